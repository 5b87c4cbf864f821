#!/usr/bin/env bash
# Build the docs site into site/; a link or a reference that leads nowhere is an error. scripts/docs.sh serve shows it.
set -euo pipefail
# shellcheck source=scripts/tools_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/tools_env.sh"
cd "$REPO"
case ${1:-build} in
    build) NO_MKDOCS_2_WARNING=1 exec "$TOOLS/bin/mkdocs" build --strict --clean ;;
    serve) exec "$TOOLS/bin/mkdocs" serve "${@:2}" ;;
    *) echo "usage: scripts/docs.sh [build | serve]" >&2; exit 2 ;;
esac
