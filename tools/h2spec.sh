#!/usr/bin/env bash
# Runs the public HTTP/2 conformance suite h2spec, with --strict, against our gRPC server in plaintext and over TLS.
#
#   tools/h2spec.sh [SERVER]     SERVER: the built example h2_server; without it, it is built
#
# Fails when a case fails or is skipped. Needs Go and a Go module proxy; versions are pinned in tests/h2spec.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

recipe=$(cat tests/h2spec/go.mod tests/h2spec/go.sum "$0" | sha256sum | cut -c1-12)
h2spec=$CACHE/h2spec-$recipe
if [ ! -e "$h2spec" ]; then
  command -v go >/dev/null || die "go is missing: run tools/setup.sh"
  mkdir -p "$CACHE"
  say "building h2spec"
  (cd tests/h2spec && GOFLAGS=-mod=readonly CGO_ENABLED=0 \
    go build -o "$h2spec.$$" github.com/summerwind/h2spec/cmd/h2spec) >&2 || die "h2spec cannot be built"
  mv "$h2spec.$$" "$h2spec"
fi

# it lives until its standard input closes, which is when we end
if [ $# -gt 0 ]; then server=("$1"); else server=(cargo run --locked --quiet --example h2_server); fi
coproc SERVER { exec "${server[@]}"; }
read -r plain encrypted <&"${SERVER[0]}" || die "the server did not start: ${server[*]}"

failed=
run() {
  local mode=$1 output summary; shift
  output=$("$h2spec" --strict --host 127.0.0.1 "$@") || failed=yes
  summary=$(grep -E '^[0-9]+ tests, ' <<<"$output" || echo 'no summary')
  echo "h2spec --strict, $mode: $summary"
  if ! grep -qE '^([0-9]+) tests, \1 passed, 0 skipped, 0 failed$' <<<"$summary"; then
    failed=yes
    printf '%s\n' "$output"
  fi
}
run plaintext --port "$plain"
run TLS --port "$encrypted" --tls --insecure
[ -z "$failed" ] || die "h2spec found fault"
