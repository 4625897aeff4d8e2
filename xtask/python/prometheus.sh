#!/usr/bin/env bash
# What alert rules and boards are tested with: Prometheus' tool, and LMCache's board for Grafana. Prints
# their folder on stdout.
#
# The folder lies in LMC_CACHE_DIR (~/.cache/lmc unless set) under a name for what goes into it. Quick
# when it is complete. Installs nothing on this machine. Ends with status 75 where what is missing
# cannot be had here; the last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

make() {
    local folder=$1 tool board
    for tool in apt-get dpkg-deb tar; do
        command -v "$tool" >/dev/null || cannot "no $tool here"
    done
    log "making $folder (downloads about 19 MB from Debian and 9 MB from PyPI, 50 MB on disk)"
    mkdir -p "$folder/work"
    debian_update || cannot "apt-get could not fetch Debian's lists of packages"
    (cd "$folder/work" && apt_get -o APT::Sandbox::User=root download prometheus) ||
        cannot "apt-get could not download prometheus"
    dpkg-deb --fsys-tarfile "$folder"/work/prometheus_*.deb |
        tar -x -C "$folder" --strip-components=3 ./usr/bin/promtool
    rm -r "$folder/work"
    find_python 'True' "no Python here"
    board=$("$python" "$here/sdists.py" lmcache-0.5.6.tar.gz \
        d6951e60ce8818a76aa42d0866a4ba85f1c95cd919355fff30ff24dcc3243f1e \
        examples/observability/grafana/provisioning/dashboards/lmcache.json) ||
        cannot "LMCache's source distribution cannot be had: see above"
    cp "$board" "$folder/lmcache.json"
}

key=$(cat "$here/prometheus.sh" "$here/common.sh" "$here/sdists.py" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/prometheus-$key" make
