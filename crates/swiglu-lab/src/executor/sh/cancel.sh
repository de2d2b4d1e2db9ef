# $1: slurm or process, $2: id of the job.
if [ "$1" = slurm ]; then
    scancel "$2"
else
    # With its peers: nobody waits for the case in progress.
    kill -s TERM -- "-$2" 2>/dev/null || kill -s TERM "$2" 2>/dev/null
fi
