# The commands people repeat. Each works without `just`, too: copy the line.

# Arguments keep their quotes: just run --activation 'swiglu(beta=1.702)'

set positional-arguments

# List the recipes
default:
    @just --list --unsorted

# All tests: unit, conformance on every instruction set of this machine, files, command line, docs
test *ARGS:
    cargo test --workspace "$@"

# Format, then lint everything as CI does
lint:
    cargo fmt --all
    cargo clippy --workspace --all-targets --all-features -- -D warnings

# Build the documentation; warnings are errors
doc *ARGS:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features "$@"

# After a change in one crate: its tests, lints, format
quick *BASE:
    .ci/quick "$@"

# What CI runs, in CI's order
ci:
    bash .ci/run

# Build the Python package as it is published, and run all of its tests beside PyTorch and transformers
python *ARGS:
    scripts/python "$@"

# What CI has no time for: every simulated variant, every kernel, the packages, the oldest compiler, fuzzing
nightly *WORDS:
    .ci/nightly "$@"

# Make and compile every package as it would be published, and compare what it promises with the last release
publish-check:
    cargo publish --workspace --dry-run --allow-dirty --locked
    cargo semver-checks --workspace --baseline-rev "$(git describe --tags --match 'v[0-9]*' --abbrev=0)"

# Run a real layer (part of the program): time, error, speed-up over the unfused way
run *ARGS:
    cargo run --release -- run "$@"

# Check every kernel of this machine against the float64 oracle
check *ARGS:
    cargo run --release -- check "$@"

# Measure speed as a fraction of what this machine can do; leave it otherwise idle
bench *ARGS:
    cargo run --release -- bench "$@"

# Show how a problem would be computed, and what it costs at least
explain *ARGS:
    cargo run --release -- explain "$@"

# Show the lab's experiments with the verdicts of their records
lab-list:
    cargo run --release -- lab list

# Run an experiment: just lab-run cpu-elementwise --run-id mine --python lab-venv/bin/python
lab-run *ARGS:
    cargo run --release -- lab run "$@"

# Measure an experiment again: exit code 1 where it is slower than its record, beyond noise
lab-gate *ARGS:
    cargo run --release -- lab gate "$@"

# Write the lab's report
lab-report OUT="target/lab-report":
    cargo run --release -- lab report --out "{{ OUT }}"

# Show where the time of a call goes, and what would make it shorter
measure *ARGS:
    cargo run --release -- explain --measure "$@"

# Run tests of Liger-Kernel, quack and transformers with our operators in the place of theirs
python-foreign *ARGS:
    scripts/python --foreign "$@"

# Gather what a GPU machine with PyTorch needs to test the Python package: target/python-gpu-bundle
python-gpu-bundle *ARGS:
    scripts/python-gpu-bundle "$@"

# Gather what a GPU machine without Rust needs to test and measure this: target/gpu-bundle
gpu-bundle:
    scripts/gpu-bundle

# Compute a block of candle with candle and with swiglu: results compared, times
candle:
    cargo run --release --manifest-path examples/candle/Cargo.toml

# Fuzz a file reader (safetensors, gguf, parts, recognise or npy); needs `cargo install cargo-fuzz --locked`, no nightly
fuzz TARGET SECONDS="60":
    scripts/fuzz {{ TARGET }} -max_total_time={{ SECONDS }}
