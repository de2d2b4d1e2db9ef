# Where jobs may lie, and what is there: $1 is a directory, or empty.
set -u
root=${1:-${XDG_CACHE_HOME:-$HOME/.cache}}/swiglu-lab
case $root in "~/"*) root=$HOME/${root#"~/"} ;; esac
mkdir -p "$root/bundles" "$root/jobs" && cd "$root" || exit
# What nothing used for a month.
find bundles jobs -mindepth 1 -maxdepth 1 -type d -mtime +30 -exec rm -rf {} +
pwd -P
uname -m
command -v rsync || echo none
