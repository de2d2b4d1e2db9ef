# What there is here: a word, and what was found, on each line. $1 is a command.
echo "system $(uname -sm)"
echo "command $(command -v "$1")"
for program in tar rsync; do
    command -v "$program" >/dev/null && echo "$program $($program --version 2>&1 | head -n 1)"
done
df -h "${XDG_CACHE_HOME:-$HOME}" 2>/dev/null | awk 'NR == 2 { print "space " $4 }'
command -v sbatch >/dev/null && sbatch --version 2>/dev/null | sed 's/^/sbatch /'
command -v sinfo >/dev/null && sinfo -h -o 'partition %P %a, %D nodes %T, gres %G' 2>/dev/null
exit 0
