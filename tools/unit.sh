#!/usr/bin/env bash
# Runs the unit tests, and the tests against real peers that need no VM. Most test programs wait for other programs and for timers, so
# several run at once (AT_ONCE=N; by default twice as many as there are processors). The output of a program is in target/tests while
# it runs, and is printed when it has ended. At the end come the ten programs that took longest, and what the failed tests printed.
#
#   tools/unit.sh [COMMAND [ARGUMENT...]]     runs the command too, in the time that compilation and tests leave
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

export LOGS=$ROOT/target/tests
rm -rf "$LOGS"; mkdir -p "$LOGS"

if [ $# -gt 0 ]; then
  setsid chrt --idle 0 "$@" >"$LOGS/beside.log" 2>&1 </dev/null &
  beside=$!
  trap 'kill -- "-$beside" "$beside" 2>/dev/null || true' EXIT
fi

cargo test --locked --no-run

# those that take longest begin first
FIRST=(node model libraries cloud_vtpm standalone hostile_peers key_wrapping services)
mapfile -t all < <(cargo metadata --locked --no-deps --format-version 1 | python3 -c '
import json, sys
for package in json.load(sys.stdin)["packages"]:
    for target in package["targets"]:
        if "test" in target["kind"]:
            print(target["name"])')
rest=()
for name in "${all[@]}" documents; do
  [[ " ${FIRST[*]} " == *" $name "* ]] || rest+=("$name")
done

run() {
  local name=$1 start=$SECONDS status=0 what
  case $name in
  libraries) what=(--lib --bins) ;;
  documents) what=(--doc) ;;
  *) what=(--test "$name") ;;
  esac
  cargo test --locked "${what[@]}" >"$LOGS/$name.log" 2>&1 </dev/null || status=$?
  echo "$((SECONDS - start)) $name" >>"$LOGS/times"
  [ $status = 0 ] || echo "$name" >>"$LOGS/failed"
  (flock 9; cat "$LOGS/$name.log") 9>"$LOGS/lock"
}
export -f run
printf '%s\n' "${FIRST[@]}" "${rest[@]}" | xargs -P "${AT_ONCE:-$((2 * $(nproc)))}" -I '{}' bash -c 'run "$1"' run '{}'

if [ $# -gt 0 ]; then
  if kill -0 "$beside" 2>/dev/null; then say "the tests have run; waiting for $*"; fi
  wait "$beside" || echo "$*" >>"$LOGS/failed"
  trap - EXIT
  cat "$LOGS/beside.log"
fi

say "the slowest test programs, in seconds:"
sort -rn "$LOGS/times" | head -n 10 | sed 's/^/     /' >&2
[ -e "$LOGS/failed" ] || exit 0
while read -r name; do
  say "failed: $name"
  # what comes after the list of the tests that passed: the output of those that failed, or an error of the compiler
  [ ! -e "$LOGS/$name.log" ] || awk '/^failures:$/ || /^error/ { on = 1 } on' "$LOGS/$name.log" | tail -n 200
done <"$LOGS/failed"
die "failed, with the output in $LOGS: $(paste -sd ' ' "$LOGS/failed")"
