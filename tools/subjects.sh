#!/usr/bin/env bash
# Checks that the subjects of the latest commits have at most 72 characters, as CONTRIBUTING.md says. It checks the last 50 commits,
# as far as they are newer than this check. A shallow clone has fewer commits, and an archive without .git has none.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

[ -e .git ] || exit 0
added=$(git log --diff-filter=A --max-count=1 --format=%H -- tools/subjects.sh)
long=$(git log --no-merges --max-count=50 --format=%s "${added:+$added..}HEAD" | awk 'length > 72')
[ -z "$long" ] || die "these subjects have more than 72 characters; shorten them (git rebase --interactive): $long"
