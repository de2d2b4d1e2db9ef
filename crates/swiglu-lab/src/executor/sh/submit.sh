# Submits the script on standard input once, and prints what the job is called from now on.
# $1: slurm or process, $2: directory of the job, $3: its name, then options of sbatch.
set -u
kind=$1 dir=$2 name=$3
shift 3
mkdir -p "$dir/records" && cat >"$dir/script.part" && mv "$dir/script.part" "$dir/script" || exit
rm -f "$dir/exit" "$dir/id"
if [ "$kind" = slurm ]; then
    # What the time limit ends is told a minute before, by a signal that the script passes on.
    id=$(sbatch --parsable --job-name="$name" --chdir="$dir" --output="$dir/log" --open-mode=append \
        --requeue --signal=B:TERM@60 "$@" "$dir/script") || exit
    # Behind a semicolon is the cluster.
    id=${id%%;*}
elif command -v setsid >/dev/null; then
    setsid nohup sh "$dir/script" </dev/null >>"$dir/log" 2>&1 &
    id=$!
else
    nohup sh "$dir/script" </dev/null >>"$dir/log" 2>&1 &
    id=$!
fi
echo "$id" >"$dir/id.part" && mv "$dir/id.part" "$dir/id" && echo "$id"
