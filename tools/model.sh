#!/usr/bin/env bash
# Checks the models of the protocol in models/ with Verifpal: each claim holds, and each weakening gives an attack. A line
# `// weaken NAME: LINE` puts LINE in the place of the model's line before it.
#
#   tools/model.sh [MODEL...]     models such as `strong`; without them, all
. "$(dirname "$0")/lib.sh"
VERSION=1.6.7
TOOLCHAIN=1.98.0 # the least that it needs
LIMIT=900        # seconds for one analysis
tool=$CACHE/verifpal-$VERSION
if [ ! -x "$tool/bin/verifpal" ]; then
  command -v rustup >/dev/null || die "rustup is missing, by which Rust $TOOLCHAIN comes: https://rustup.rs"
  say "building Verifpal $VERSION (once; some minutes)"
  rustup toolchain install --profile minimal --no-self-update "$TOOLCHAIN" >&2
  # built outside the checkout, whose configuration would make it a musl program
  (cd / && cargo "+$TOOLCHAIN" install --quiet --locked --no-track --root "$tool" --target "$GNU" "verifpal@$VERSION" >&2)
fi
cd "$ROOT/models"
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

# Prints a model with the lines of a weakening. Usage: weakened NAME FILE
weakened() {
  awk -v mark="// weaken $1:" '
    { at = index($0, mark) }
    at { line = substr($0, at + length(mark)); next }
    index($0, "// weaken ") { next }
    NR > 1 { print line }
    { line = $0 }
    END { print line }' "$2"
}

# Prints the queries of a model that an attack breaks. Usage: broken FILE SESSIONS
broken() {
  local code query
  code=$(timeout "$LIMIT" "$tool/bin/verifpal" verify --quiet --result-code --sessions "$2" "$1") ||
    die "$(basename "$1"): Verifpal gave no verdict (limit: $LIMIT s) $code"
  while read -r query; do
    [ "${code:0:2}" = "${query:0:1}0" ] || echo "$query"
    code=${code:2}
  done < <(sed -n 's/^\t\([a-z]*? .*\)/\1/p' "$1")
  [ -z "$code" ] || die "$(basename "$1"): more verdicts than queries"
}

failed=
report() { printf '%-32s %s\n' "$1" "$2"; }
models=(*.vp)
[ $# -gt 0 ] || set -- "${models[@]%.vp}"
for model; do
  sessions=$(sed -n 's|^// sessions: ||p' "$model.vp")
  attacks=$(broken "$model.vp" "${sessions:-2}")
  if [ -z "$attacks" ]; then report "$model" "holds: $(grep -cP '^\t[a-z]+\? ' "$model.vp") claims"; else
    failed=yes
    report "$model" "ATTACKED: ${attacks//$'\n'/; }"
  fi
  for weakening in $(sed -n 's|.*// weaken \([a-z-]*\):.*|\1|p' "$model.vp" | sort -u); do
    weakened "$weakening" "$model.vp" >"$scratch/$model-$weakening.vp"
    # one session of each end is faster, and enough for most attacks; more sessions only add attacks
    attacks=$(broken "$scratch/$model-$weakening.vp" 1)
    [ -n "$attacks" ] || attacks=$(broken "$scratch/$model-$weakening.vp" 2)
    [ -n "$attacks" ] || failed=yes
    report "$model, $weakening" "$([ -n "$attacks" ] && echo "attacked: ${attacks//$'\n'/; }" || echo "NO ATTACK")"
  done
done
[ -z "$failed" ] || die "a claim does not hold, or a weakening gives no attack"
