#!/usr/bin/env bash
# Makes a Debian without any package that it can do without, for checks of what operators install:
# `base`, and two layers over it: `tools` with lintian, man, systemd and shells, and `images` with podman.
# Prints the folder of all three on stdout.
#
# The folder lies in LMC_CACHE_DIR (~/.cache/lmc unless set) under a name for what goes into it.
# Quick when it is complete. Installs nothing on this machine. Ends with status 75 where what is
# missing cannot be had here; the last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
SUITE=bookworm
MIRROR=http://deb.debian.org/debian

# Installs packages into a layer over another: `layer FOLDER LAYER BELOW PACKAGES...`. In namespaces
# of its own, so that no mount is left when this is cut off.
layer() {
    log "layer $2"
    mkdir -p "$1/$2"
    unshare --mount --pid --fork bash -euc '
        at=$(mktemp -d)
        mount -t overlay overlay -o "lowerdir=$1/$3,upperdir=$1/$2,workdir=$1/work" "$at"
        mount -t proc proc "$at/proc"
        chroot "$at" apt-get -qq update
        chroot "$at" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
            --no-install-recommends "${@:4}"
        chroot "$at" apt-get clean
        umount "$at/proc" "$at"
        rmdir "$at"
    ' layer "$@" >&2 || cannot "Debian packages could not be installed: see above"
    rm -rf "$1/work"
    mkdir "$1/work"
}

make() {
    local folder=$1 tool
    [ "$(id -u)" = 0 ] || cannot "only root can make a Debian to install packages into"
    for tool in apt-get dpkg-deb chroot ip nsenter unshare wget; do
        command -v "$tool" >/dev/null || cannot "no $tool here"
    done
    log "making $folder (downloads about 170 MB from $MIRROR, 700 MB on disk)"
    mkdir -p "$folder/debootstrap" "$folder/work"
    debian_update || cannot "apt-get could not fetch Debian's lists of packages"
    (cd "$folder/work" && apt_get -o APT::Sandbox::User=root download debootstrap) ||
        cannot "apt-get could not download debootstrap"
    dpkg-deb -x "$folder"/work/debootstrap_*.deb "$folder/debootstrap"
    rm "$folder"/work/debootstrap_*.deb
    export DEBOOTSTRAP_DIR=$folder/debootstrap/usr/share/debootstrap
    "$folder/debootstrap/usr/sbin/debootstrap" --variant=minbase "$SUITE" "$folder/base" "$MIRROR" >&2 ||
        cannot "debootstrap could not make a Debian $SUITE out of $MIRROR: see above"
    rm -rf "$folder"/base/var/cache/apt/archives/*.deb
    layer "$folder" tools base fish lintian man-db systemd zsh
    layer "$folder" images base ca-certificates crun podman
}

key=$(cat "$here/debian.sh" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/debian-$SUITE-$key" make
