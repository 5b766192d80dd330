# Makes this bash stop a block in braces at its first command that fails. The shell stays open, and its variables keep their values.
# bash reads a block in braces to its end before it runs it, so the interrupt ends the whole block.
set -o errtrace -o pipefail
trap '((BASH_SUBSHELL)) && exit 1; echo "stopped at: $BASH_COMMAND" >&2; kill -INT $$' ERR
