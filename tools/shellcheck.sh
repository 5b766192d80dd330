#!/usr/bin/env bash
# Checks each shell script of the repository, known by its first line. Root's .shellcheckrc says what is not a fault here.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

git grep --cached -I -n -E -e '^#!.*[/ ](ba|a)?sh' | sed -n 's/:1:.*//p' | xargs shellcheck --severity warning
# for other scripts
shellcheck --severity warning --shell bash --exclude SC2034 tools/lib.sh
