#!/usr/bin/env bash
# Prints the page "All options": the help of each program and command. The book, and the documents of a release, have it.
#
#   tools/options.sh [FOLDER]     the programs of this folder; without it, those of `cargo build`
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

if [ $# -eq 0 ]; then
  cargo build --quiet --locked --workspace --bins >&2
  set -- "$(cargo metadata --no-deps --format-version 1 --locked | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')"
  # the checkout's configuration may name a target
  for folder in "$1/$MUSL/debug" "$1/debug"; do [ ! -x "$folder/firstlight" ] || { set -- "$folder"; break; }; done
fi

section() { printf '\n## `%s`\n\n```text\n%s\n```\n' "$1" "$("$programs/${1%% *}" "${@:2}" --help)"; }

programs=$1
printf '# All options\n\nThe help of each program and command, as it prints it.\n'
section firstlight
# the groups of commands stand before the options
for command in $("$programs/firstlight" --help | awk '/^Options:$/ { exit } /^  [a-z]/ { print $1 }'); do
  section "firstlight $command" "$command"
done
for program in unlock bootstrapper join-service key-service member-controller firstlight-volume; do section "$program"; done
