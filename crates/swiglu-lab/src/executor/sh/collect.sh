# Prints the records below $1, each between lines of its own. A file that is being written has a name
# that begins with a dot.
set -u
cd "$1" || exit
for file in records/*/*.json; do
    [ -f "$file" ] || continue
    echo "=== swiglu-lab record"
    cat "$file" || exit
    echo "=== swiglu-lab end"
done
