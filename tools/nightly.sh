#!/usr/bin/env bash
# Runs the targets of tests/nightly.tsv, the most overdue first, and adds a line for each to tests/ledger.tsv. A failure does not stop it,
# nor does a target that takes five times its minutes. A target is overdue if it never was green, if a file that it covers has changed since
# then, or after 150 commits; so an interrupted run is resumed. Of those that never were green, the one with the fewest lines is first.
# HOURS=2: starts nothing that would end later. `tools/nightly.sh due` prints what is overdue, and fails if there is any;
# `tools/nightly.sh TARGET..` runs those of these that are.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

COMMITS=150

# Prints the overdue targets: commits since the last green line, target, minutes, reason.
overdue() {
  local target minutes paths green ran behind changed
  while IFS=$'\t' read -r target minutes paths; do
    green=$(awk -F'\t' -v target="$target" '$1 == target && $5 == "green" { commit = $2 } END { print commit }' tests/ledger.tsv)
    if [ -z "$green" ] || ! git merge-base --is-ancestor "$green" HEAD 2>/dev/null; then
      ran=$(grep -c -P "^$target\t" tests/ledger.tsv) || true
      printf '%s\t%s\t%s\t%s\n' $((999999 - ran)) "$target" "$minutes" "no green line of this history"
      continue
    fi
    behind=$(git rev-list --count "$green..HEAD")
    # shellcheck disable=SC2086 # a list of paths
    changed=$(git diff --name-only "$green" HEAD -- $paths ':!tests/ledger.tsv' | wc -l)
    if [ "$changed" -gt 0 ] || [ "$behind" -gt $COMMITS ]; then
      printf '%s\t%s\t%s\t%s\n' "$behind" "$target" "$minutes" "$changed of its files have changed in $behind commits since ${green:0:8}"
    fi
  done < <(grep -v '^#' tests/nightly.tsv) | sort --stable --numeric-sort --reverse --key=1,1
}

# Prints the versions of the programs that the tests meet.
peers() {
  rustc --version | cut -d' ' -f1,2
  go version | cut -d' ' -f3
  qemu-system-x86_64 --version | head -n 1 | cut -d' ' -f1,4
  swtpm --version | sed 's/.*version \([0-9.]*\),.*/swtpm \1/'
  sed -n 's/^VERSION=${KUBERNETES_VERSION:-\(.*\)}.*/kubernetes \1/p' tools/kubernetes.sh
}

due=$(overdue)
if [ "${1:-}" = due ]; then
  [ -n "$due" ] || exit 0
  cut -f2- <<<"$due" | column -t -s $'\t' -N 'overdue target,minutes,why'
  exit 1
fi

if [ $# -gt 0 ]; then
  for target; do grep -q -P "^$target\t" tests/nightly.tsv || die "$target is no target of tests/nightly.tsv"; done
  due=$(awk -F'\t' -v named=" $* " 'index(named, " " $2 " ")' <<<"$due")
fi
[ -n "$due" ] || { say "nothing is overdue"; exit 0; }
# the ledger names commits
is_clean() { [ -z "$(git status --porcelain -- . ':!tests/ledger.tsv')" ]; }
is_clean || die "commit or stash the changes of the checkout first"
commit=$(git rev-parse HEAD)
end=$((SECONDS + $(awk "BEGIN { print int(${HOURS:-6} * 3600) }")))
peers=$(peers | paste --serial --delimiters=,)
logs=$ROOT/target/nightly
mkdir -p "$logs"
# a changed ledger would make the checkout another one for the targets that follow
: >"$logs/ledger.tsv"
trap 'cat "$logs/ledger.tsv" >>tests/ledger.tsv' EXIT
failed=0
while IFS=$'\t' read -r _ target minutes why; do
  if [ $((SECONDS + minutes * 60)) -gt $end ]; then
    say "$target: left for another run, because it takes $minutes minutes"
    continue
  fi
  say "make $target: $why; its output is in $logs/$target.log"
  start=$SECONDS result=green
  timeout --kill-after=60 $((minutes * 300)) make --no-print-directory "$target" </dev/null >"$logs/$target.log" 2>&1 ||
    { result=red failed=1; tail -n 20 "$logs/$target.log" >&2; }
  [ "$(git rev-parse HEAD)" = "$commit" ] && is_clean || die "the checkout has changed while make $target ran: its result is not written down"
  taken=$(((SECONDS - start + 59) / 60))
  printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$target" "$commit" "$(date -u +%F)" $taken $result "$peers" >>"$logs/ledger.tsv"
  say "$target is $result after $taken minutes"
done <<<"$due"
exit $failed
