# How many lines of records there are.
lines() {
    cat records/*/*.json 2>/dev/null | wc -l
}
# Slurm starts the job again by itself, if this start got anywhere; nobody need be there to see it.
again() {
    [ "$code" = 75 ] && [ "$(lines)" -gt "$before" ] && scontrol requeue "$SLURM_JOB_ID" || return 0
    # This ends it.
    sleep 60
}
