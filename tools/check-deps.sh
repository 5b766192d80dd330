#!/usr/bin/env bash
# No asynchronous runtime in any shipped program, and no second library for a job that one already does. Names the crates
# that are there in two versions.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

RUNTIMES='tokio|async-std|async-io|async-executor|async-global-executor|smol|futures|futures-executor|futures-util|mio|glommio|monoio|embassy-executor|actix-rt|hyper|tonic|h2'
# TLS and cryptography come from rustls and ring; errors and arguments are our own
SECOND_WAYS='openssl|openssl-sys|native-tls|aws-lc-rs|aws-lc-sys|reqwest|anyhow|clap'
# what a parser that we use makes its one error type with is its own affair
NOT_OURS='thiserror'

tree=$(cargo tree --package firstlight --locked --target $MUSL --edges normal,no-proc-macro --prefix none --format '{p}' | awk '{print $1}' | sort -u)
found=$(grep -xE "$RUNTIMES" <<<"$tree" || true)
[ -z "$found" ] || die "an asynchronous runtime, or what only works in one, is linked: $found"
found=$(grep -xE "$SECOND_WAYS" <<<"$tree" || true)
[ -z "$found" ] || die "a second library for a job that another already does is linked: $found"
direct=$(cargo tree --package firstlight --locked --target $MUSL --edges normal --depth 1 --prefix none --format '{p}' | awk '{print $1}' | sort -u)
found=$(grep -xE "$NOT_OURS" <<<"$direct" || true)
[ -z "$found" ] || die "a library for what is our own is linked: $found"
say "$(wc -l <<<"$tree") crates on the way to the programs, no asynchronous runtime"

twice=$(cargo tree --package firstlight --locked --target $MUSL --edges normal,no-proc-macro --duplicates --depth 0 --prefix none --format '{p}' | sed '/^$/d' | sort -u)
[ -z "$twice" ] || { say "in more than one version:"; echo "$twice" >&2; }
