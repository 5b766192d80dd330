#!/usr/bin/env bash
# Checks that the subjects of the latest commits have at most 72 characters, as CONTRIBUTING.md says: of the last 50 that came after
# this check. A shallow clone has fewer, and an archive without .git none.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

[ -e .git ] || exit 0
added=$(git log --diff-filter=A --max-count=1 --format=%H -- tools/subjects.sh)
long=$(git log --no-merges --max-count=50 --format=%s "${added:+$added..}HEAD" | awk 'length > 72')
[ -z "$long" ] || die "these subjects have more than 72 characters; shorten them (git rebase --interactive): $long"
