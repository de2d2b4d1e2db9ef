# A record that was begun elsewhere goes on here, unless it already does. $1: its file.
set -u
[ -e "$1" ] && exit 0
mkdir -p "${1%/*}" && cat >"$1.part" && mv "$1.part" "$1"
