# Removes the directory of a job that was never submitted, $1, and its bundle, $2, unless another job is of it.
set -u
rm -rf "$1" || exit
grep -qsF -- "${2##*/}" "${1%/*}"/*/script || rm -rf "$2"
