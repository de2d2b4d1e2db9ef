# What is known of a job. $1: slurm or process, $2: directory of the job, $3: its name.
set -u
kind=$1 dir=$2 name=$3
id=$(cat "$dir/id" 2>/dev/null)
if [ "$kind" = slurm ]; then
    # Whoever submitted it may have been killed before the id was written.
    [ -n "$id" ] || id=$(squeue -h -u "$(id -un)" -n "$name" -o %A 2>/dev/null | tail -n 1)
    echo "@queue $(squeue -h -j "$id" -o '%T|%N|%r' 2>&1 | tail -n 1)"
    echo "@job $(scontrol show job -o "$id" 2>&1 | tail -n 1)"
elif [ -z "$id" ]; then
    :
elif [ -d /proc/self ]; then
    # A number may have come up again: the process has the script's path in its command line.
    tr '\0' '\n' <"/proc/$id/cmdline" 2>/dev/null | grep -qxF -- "$dir/script" && echo "@alive"
elif kill -0 "$id" 2>/dev/null; then
    echo "@alive"
fi
echo "@id $id"
# After the queue: a job that has left it has written this.
[ ! -e "$dir/exit" ] || echo "@exit $(cat "$dir/exit")"
echo "@log"
tail -n 12 "$dir/log" 2>/dev/null
exit 0
