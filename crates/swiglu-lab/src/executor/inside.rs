//! What a run inside a job knows of it.

use std::env;
use std::path::Path;

use super::bundle::Bundle;
use super::scheduler::value;
use super::script::ENVIRONMENT;
use super::spec::ExecutorKind;
use crate::error::{LabError, Result};
use crate::files::said;
use crate::record::Executed;

impl Executed {
    /// Where this process runs, if an executor started it for the lab in `lab`; the bundle around that is
    /// what it was when it was made. From then on this process ends with the script of the job: nobody would
    /// wait for what it still measures, and the next start could not measure beside it.
    ///
    /// # Errors
    /// [`LabError::Foreign`] if a file of the bundle has changed; [`LabError::Name`] if the environment is not
    /// one that a script of a job makes.
    pub fn detect(lab: &Path) -> Result<Option<Self>> {
        let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let Some(given) = set(ENVIRONMENT) else { return Ok(None) };
        let mut executed: Self = serde_json::from_str(&given).map_err(|e| {
            let expected = format!("what the script of a job sets ({e}); unset it");
            LabError::name(ENVIRONMENT, given.as_str(), expected)
        })?;
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
            .map_err(LabError::io("end with the script of", lab))?;
        Bundle::check(lab.parent().unwrap_or(lab), &executed.bundle)?;
        executed.nodes.extend(said("uname", ["-n"]));
        executed.devices = set("CUDA_VISIBLE_DEVICES");
        if let (ExecutorKind::Slurm, Some(id)) = (executed.kind, set("SLURM_JOB_ID")) {
            executed.of_slurm(id, set);
        }
        Ok(Some(executed))
    }

    /// Slurm tells more than it sets; within a container its commands may be missing.
    fn of_slurm(&mut self, id: String, set: impl Fn(&str) -> Option<String>) {
        let shown = said("scontrol", ["show", "job", "-o", &id]).unwrap_or_default();
        if let Some(list) = set("SLURM_JOB_NODELIST") {
            let names = said("scontrol", ["show", "hostnames", &list]).unwrap_or(list);
            self.nodes = names.lines().map(str::to_owned).collect();
        }
        self.partition = set("SLURM_JOB_PARTITION");
        let asked = ["TresPerNode", "Gres"].iter().find_map(|name| value(&shown, name));
        self.gres = asked.map(gres_of).or(set("SLURM_JOB_GPUS"));
        self.exclusive = value(&shown, "OverSubscribe").map(|shared| shared == "NO");
        self.other_jobs = said("squeue", ["-h", "-w", &self.nodes.join(","), "-o", "%A"])
            .map(|ids| ids.lines().filter(|other| *other != id).map(str::to_owned).collect());
        self.job_id = Some(id);
    }

    /// A run that went on here after it had begun as `before`: it was in both.
    pub(crate) fn after(self, before: Option<&Self>) -> Self {
        let Some(before) = before else { return self };
        let union = |old: &[String], new: &[String]| {
            let more = new.iter().filter(|name| !old.contains(name));
            old.iter().chain(more).cloned().collect::<Vec<_>>()
        };
        // What could not be asked once is not known.
        let other_jobs = before.other_jobs.as_ref().zip(self.other_jobs.as_ref());
        let other_jobs = other_jobs.map(|(old, new)| union(old, new));
        let exclusive = before.exclusive.zip(self.exclusive).map(|(old, new)| old && new);
        let nodes = union(&before.nodes, &self.nodes);
        Self { nodes, other_jobs, exclusive, resumed: before.resumed + 1, ..self }
    }
}

/// `gres:gpu:1`, `gres/gpu:1`: how Slurm says it has changed.
fn gres_of(asked: &str) -> String {
    asked.trim_start_matches("gres:").trim_start_matches("gres/").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_goes_on_was_in_both_places() {
        let one = Executed {
            job_id: Some("7".into()),
            nodes: vec!["n1".into()],
            exclusive: Some(true),
            other_jobs: Some(vec![]),
            ..Executed::default()
        };
        let two = Executed {
            job_id: Some("8".into()),
            nodes: vec!["n2".into()],
            exclusive: Some(false),
            other_jobs: Some(vec!["5".into()]),
            ..one.clone()
        };
        let both = two.clone().after(Some(&one));
        assert_eq!((both.nodes, both.resumed), (vec!["n1".to_owned(), "n2".to_owned()], 1));
        assert_eq!((both.exclusive, both.other_jobs), (Some(false), Some(vec!["5".to_owned()])));
        assert_eq!(two.clone().after(None), two);
        assert_eq!([gres_of("gres:gpu:2"), gres_of("gres/gpu:h200:1")], ["gpu:2", "gpu:h200:1"]);
    }
}
