#!/usr/bin/env bash
# Fails when an async runtime is in the normal dependency tree of the shipped programs.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
tree=$(cargo tree --locked --target "$MUSL" --edges normal --prefix none --format '{p}' | sort -u)
if bad=$(grep -E '^(tokio|async-std|async-executor|async-io|smol|futures-executor|mio|hyper|glommio|monoio) v' <<<"$tree"); then
  die "an async runtime is linked into a shipped program: $bad"
fi
say "no async runtime among the $(wc -l <<<"$tree") crates of the shipped programs"
