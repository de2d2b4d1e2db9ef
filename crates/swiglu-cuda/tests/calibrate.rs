//! Measuring a device, as far as that can be seen where its times mean nothing.

#[path = "common/mod.rs"]
mod common;

use swiglu_cuda::tuning::TuningOptions;
use swiglu_cuda::{Cuda, CudaError, CudaOptions, Rate};

fn options(dir: &std::path::Path) -> Option<CudaOptions> {
    let tuning = TuningOptions { dir: Some(dir.to_owned()), disabled: false };
    Some(common::options()?.with_tuning(tuning))
}

#[test]
fn every_rate_is_measured_or_says_why_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let Some(options) = options(dir.path()) else { return };
    let cuda = Cuda::with_options(&options).unwrap();
    let calibrated = cuda.calibrate().unwrap();
    for (name, rate) in calibrated.rates.each() {
        let Rate { prior, measured, refused, .. } = rate;
        assert!(*prior > 0.0 && measured.is_some() != refused.is_some(), "{name}: {rate:?}");
        assert_eq!(rate.used(), measured.unwrap_or(*prior));
        // The kernels ran: what is refused is what they came to.
        let said = refused.as_deref().unwrap_or("was measured");
        assert!(said.contains("was measured") || !common::has_gpu(), "{name}: {said}");
    }
    assert_eq!(&calibrated.rates, cuda.calibration());
    assert_eq!(calibrated.replaced, None);
    let later = Cuda::with_options(&options).unwrap();
    assert_eq!(later.calibration(), &calibrated.rates);
    let path = calibrated.kept.unwrap();
    let note = later.tuning_notes().last().unwrap();
    assert!(note.starts_with(&*path.to_string_lossy()), "{note}");
    // It is measured again where that is asked for, and a file that says nothing of this device is replaced, with a reason.
    std::fs::write(&path, "no record").unwrap();
    let again = later.calibrate().unwrap();
    assert!(again.replaced.unwrap().to_string().contains("damaged"));
    assert_eq!(again.kept.as_ref(), Ok(&path));
    let note = Cuda::with_options(&options).unwrap().tuning_notes().last().unwrap().clone();
    assert!(note.starts_with(&*path.to_string_lossy()) && !note.contains("damaged"), "{note}");
}

#[test]
fn what_cannot_be_kept_is_used_by_this_process() {
    let file = tempfile::NamedTempFile::new().unwrap();
    // No directory.
    let Some(options) = options(file.path()) else { return };
    let cuda = Cuda::with_options(&options).unwrap();
    let calibrated = cuda.calibrate().unwrap();
    let why = calibrated.kept.unwrap_err().to_string();
    assert!(why.contains("cannot be kept"), "{why}");
    assert_eq!(&calibrated.rates, cuda.calibration());
    let dir = tempfile::tempdir().unwrap();
    let disabled = TuningOptions { dir: Some(dir.path().to_owned()), disabled: true };
    let cuda = Cuda::with_options(&options.with_tuning(disabled)).unwrap();
    assert!(cuda.calibrate().unwrap().kept.is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_capture_refuses_it_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let Some(options) = options(dir.path()) else { return };
    let cuda = Cuda::with_options(&options).unwrap();
    for stream in [cuda.stream(), cuda.new_stream().unwrap()] {
        let captured = stream.capture(|| {
            let refused = cuda.calibrate().unwrap_err();
            assert!(matches!(refused, CudaError::Capture { .. }), "{refused}");
            assert!(refused.to_string().contains("measuring the device"), "{refused}");
            Ok::<_, CudaError>(())
        });
        captured.unwrap();
    }
    assert!(!cuda.calibration().is_measured());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
