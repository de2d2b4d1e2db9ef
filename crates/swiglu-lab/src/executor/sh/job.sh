# Runs "$@" with $input, its output in descriptor $out, and tells how it ended. SIGTERM is passed on:
# the program finishes its case and ends with 75, and the job goes on later.
child= asked= stopped= code=
trap 'asked=1 stopped=1; [ -z "$child" ] || kill -s TERM "$child" 2>/dev/null' TERM
"$@" <"$input" >&"$out" &
child=$!
[ -z "$asked" ] || kill -s TERM "$child"
while :; do
    stopped=
    wait "$child"
    last=$?
    # 127: it was waited for just before the signal came.
    [ "$last" = 127 ] && [ -n "$code" ] || code=$last
    [ -n "$stopped" ] || break
done
# A signal that came before the program could listen.
[ "$code" = 143 ] && [ -n "$asked" ] && code=75
