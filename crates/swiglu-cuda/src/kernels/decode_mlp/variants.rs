//! The variants of the decode kernel that devices launch.

use swiglu_core::quant::QuantizedTypes;
use swiglu_core::{Activation, DType, Numerics, Op, Problem, WeightLayout};

use super::super::gate::GateCode;
use super::super::{NamedVariant, default_code};
use super::Limits;
use super::config::{Config, Feed, MOST_TOKENS, Part};
use super::format::{Format, Math};
use super::sm90_decode_mlp::{Feeding, Form, Ring};
use crate::device::jit::Variant;

/// " Nibbles+Bytes".
fn weights_name(formats: [Format; 2]) -> String {
    match formats {
        [Format::Elements, _] => String::new(),
        [gate_up, down] => format!(" {gate_up:?}+{down:?}"),
    }
}

pub(super) fn named(config: Config, code: GateCode) -> NamedVariant {
    let Config { part, warps, depth, .. } = config;
    let (code_name, part, tokens) = (code.name(), part_name(part), config.math.tokens());
    let weights = weights_name(config.formats);
    let x = |not_staged| if config.stage_x { "" } else { not_staged };
    let name = match config.feed {
        _ if config.part == Part::Sequential => format!("{code_name} {tokens} tokens {part}"),
        Feed::Lanes => {
            let x = x(" cached-x");
            format!("{code_name} {part} {tokens} tokens {warps}x{depth}{x}{weights}")
        }
        Feed::Tma(Feeding { group, down_high, .. }) => {
            let (high, x) = (if down_high { "" } else { " low" }, x(" x in pieces"));
            format!("{code_name} {tokens} tokens TMA {warps}x{group}{high}{x}{weights}")
        }
        Feed::Held(_) => format!("{code_name} {part} {tokens} tokens held{weights}"),
    };
    NamedVariant { name, variant: config.variant(code) }
}

/// Of `sm90_decode_mlp.cu`: every activation and mode; every class of tokens, form, length of pieces and
/// place of x with the default one; of quantised weights one type, in every form.
pub(in crate::kernels) fn sm90_variants(dtype: DType) -> Vec<NamedVariant> {
    let of_formats = |code: GateCode, form: &Form, group, (math, formats), down_high, stage_x| {
        let down_high = down_high || matches!(math, Math::Tensor(_));
        let feed = Feed::Tma(Feeding { ring: Ring::default(), group, down_high });
        let config = Config { math, formats, feed, stage_x, warps: form.warps, ..Config::NOTHING };
        named(config, code)
    };
    let of_elements = |code: GateCode, form: &Form, group, math: Math, down_high, stage_x| {
        of_formats(code, form, group, (math, [Format::Elements; 2]), down_high, stage_x)
    };
    let most = if dtype == DType::F32 { Math::Fma(4) } else { Math::Tensor(8) };
    let codes = GateCode::all(dtype).into_iter();
    let mut all: Vec<_> =
        codes.map(|code| of_elements(code, &Form::NARROW, 2, most, true, true)).collect();
    let default = default_code(dtype);
    for math in [1, 2, 4, 8, 16].into_iter().filter_map(|m| Math::of(dtype, m).ok()) {
        let math = math.by_tma(dtype);
        for (form, group) in [(Form::NARROW, 2), (Form::NARROW, 4), (Form::WIDE, 2)] {
            all.push(of_elements(default, &form, group, math, true, true));
            all.push(of_elements(default, &form, group, math, false, true));
            all.push(of_elements(default, &form, group, math, true, false));
        }
    }
    for math in [8, 16].into_iter().filter_map(|m| Math::of_quantized(dtype, m).ok()) {
        for format in Format::QUANTIZED {
            let kinds = (math, [format; 2]);
            for form in [Form::NARROW, Form::WIDE] {
                let many = math.tokens() == MOST_TOKENS;
                if many && format == Format::Nibbles && form == Form::WIDE {
                    continue;
                }
                all.push(of_formats(default, &form, 2, kinds, true, true));
                if many {
                    all.push(of_formats(default, &form, 2, kinds, true, false));
                }
            }
        }
    }
    all.extend(held_variants(dtype));
    without_doubles(all)
}

/// Of `sm90_held_mlp.cu`, with the weights of 896/4864 on 132 SMs: every type, and with one of them every
/// activation and mode.
fn held_variants(dtype: DType) -> Vec<NamedVariant> {
    let limits = Limits {
        multiprocessors: 132,
        shared: 227 * 1024,
        cooperative: true,
        programmatic: true,
        tma: true,
    };
    let held = |code: GateCode, part: Part, format: Format, m: usize| {
        let problem = Problem::new(Op::Mlp, m, 896, 4864, dtype, Activation::SWIGLU)
            .with_numerics(Numerics::default_for(dtype))
            .with_layout(WeightLayout::HF)
            .with_quantized(QuantizedTypes::of(Op::Mlp, format.kind()?));
        // f32 has none.
        let [gate_up, down] = Config::fit_held(&problem, &limits).ok()?;
        Some(named(if part == Part::Down { down } else { gate_up }, code))
    };
    let default = default_code(dtype);
    let codes = GateCode::all(dtype).into_iter();
    let of_codes = codes.filter_map(|code| held(code, Part::GateUp, Format::Nibbles, 8));
    let kinds = Format::QUANTIZED.into_iter().flat_map(|format| {
        [8, MOST_TOKENS]
            .into_iter()
            .flat_map(move |m| [Part::GateUp, Part::Down].map(|part| (part, format, m)))
    });
    of_codes.chain(kinds.filter_map(|(part, format, m)| held(default, part, format, m))).collect()
}

fn part_name(part: Part) -> &'static str {
    ["both", "gate-up", "down", "sequential"][part as usize]
}

/// 4 and 8 of 16-bit types share their code, and the default one is among all.
fn without_doubles(mut all: Vec<NamedVariant>) -> Vec<NamedVariant> {
    let mut seen: Vec<Variant> = Vec::new();
    all.retain(|v| {
        let new = !seen.contains(&v.variant);
        seen.push(v.variant);
        new
    });
    all
}

/// Every activation and mode with tensor cores or, in f32, without; every class of tokens, ring and
/// place of x with the default one.
pub(in crate::kernels) fn variants(dtype: DType) -> Vec<NamedVariant> {
    let mut all: Vec<NamedVariant> = Vec::new();
    let mut push = |code: GateCode, part, math: Math, formats, ring: (bool, usize, usize)| {
        let (stage_x, warps, depth) = ring;
        let config = Config { part, math, formats, stage_x, warps, depth, ..Config::NOTHING };
        all.push(named(config, code));
    };
    let (elements, deep) = ([Format::Elements; 2], (true, 16, 8));
    let most = if dtype == DType::F32 { Math::Fma(4) } else { Math::Tensor(8) };
    for code in GateCode::all(dtype) {
        push(code, Part::Both, most, elements, deep);
    }
    let default = default_code(dtype);
    for math in [1, 2, 4, 8, 16].into_iter().filter_map(|m| Math::of(dtype, m).ok()) {
        for ring in [deep, (true, 16, 4), (true, 8, 4), (false, 16, 8), (false, 8, 4)] {
            push(default, Part::Both, math, elements, ring);
        }
        push(default, Part::GateUp, math, elements, (true, 8, 8));
        push(default, Part::GateUp, math, elements, (false, 8, 8));
        push(default, Part::Down, math, elements, (false, 8, 8));
    }
    // A model mostly has one type of quantised weights. Its two halves are apart in the two launches, so
    // one of the others is enough of these, and of mixtures.
    for math in [8, 16].into_iter().filter_map(|m| Math::of_quantized(dtype, m).ok()) {
        for format in Format::QUANTIZED {
            push(default, Part::Both, math, [format; 2], deep);
        }
    }
    if let Ok(math) = Math::of_quantized(dtype, MOST_TOKENS) {
        for format in Format::QUANTIZED {
            let formats = [format; 2];
            push(default, Part::Both, math, formats, (false, 16, 4));
            push(default, Part::GateUp, math, formats, (true, 8, 8));
            push(default, Part::Down, math, formats, (false, 8, 8));
        }
        push(default, Part::Both, math, [Format::Nibbles, Format::Bytes], deep);
    }
    for tokens in [1, 4, MOST_TOKENS] {
        let Ok(config) = Config::sequential(tokens) else { continue };
        all.push(named(config, default));
    }
    without_doubles(all)
}
