#!/usr/bin/env bash
# What the page in the browser and `lmc top` are tested with: Chromium and tmux of Debian, which are
# installed where they are missing, and from npm what drives it and what checks accessibility. Prints their folder on stdout.
#
# The folder lies in LMC_CACHE_DIR (~/.cache/lmc unless set) under a name for what goes into it. Ends
# with status 75 where what is missing cannot be had here; the last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

make() {
    local folder=$1
    command -v node >/dev/null || cannot "no Node.js here: apt-get install nodejs npm"
    command -v npm >/dev/null || cannot "no npm here: apt-get install npm"
    node -e 'process.exit(process.versions.node.split(".")[0] < 18 ? 1 : 0)' ||
        cannot "Node.js $(node --version) is too old: 18 is needed"
    log "making $folder (downloads about 12 MB from npm)"
    mkdir -p "$folder"
    (cd "$folder" && npm install --no-audit --no-fund --ignore-scripts --save-exact \
        puppeteer-core@24.43.1 axe-core@4.14.1 >&2) || cannot "npm could not install puppeteer-core and axe-core"
}

command -v chromium >/dev/null || debian chromium
command -v tmux >/dev/null || debian tmux
key=$(cat "$here/browser.sh" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/browser-$key" make
