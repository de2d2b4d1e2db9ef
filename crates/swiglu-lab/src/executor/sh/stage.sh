# A bundle appears whole or not at all. $1: what to do, $2: its directory, $3: how tar unpacks it.
set -u
part=$2.part
case $1 in
has) [ -e "$2" ] && touch "$2" ;;
tar)
    part=$part-$$
    mkdir "$part" || exit
    if tar -C "$part" "$3" - && { [ -e "$2" ] || mv "$part" "$2"; }; then
        rm -rf "$part"
    else
        code=$?
        rm -rf "$part"
        exit "$code"
    fi
    ;;
rsynced) [ -e "$2" ] || mv "$part" "$2" ;;
failed) rm -rf "$part" ;;
esac
