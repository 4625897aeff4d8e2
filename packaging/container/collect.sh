#!/bin/sh
# Collects the files of the image into a folder: the program, and the libraries that it is linked to.
set -eu
image=$1
mkdir -p "$image/usr/bin" "$image/etc/ssl/certs" "$image/opt/venv/bin" "$image/run/lmc" \
    "$image/var/lib/lmc"
cp /usr/bin/lmc "$image/usr/bin/lmc"
# LMCache's operator for Kubernetes starts /opt/venv/bin/lmcache server.
ln -s /usr/bin/lmc "$image/opt/venv/bin/lmcache"
# The libraries, the loader included; the libraries that resolve names of hosts and users; and librt, which
# GPU drivers need.
libraries=$(ldd /usr/bin/lmc | grep -o '/[^ ]*')
folder=$(dirname "$(ldd /usr/bin/lmc | grep -o '/[^ ]*/libc\.so\.6')")
for file in $libraries "$folder/librt.so.1" "$folder/libresolv.so.2" \
    "$folder/libnss_dns.so.2" "$folder/libnss_files.so.2"; do
    mkdir -p "$image$(dirname "$file")"
    cp -L "$file" "$image$file"
done
certificates=/ca-certificates.crt
if [ ! -e "$certificates" ]; then
    apt-get update
    apt-get install --yes --no-install-recommends ca-certificates
    certificates=/etc/ssl/certs/ca-certificates.crt
fi
cp "$certificates" "$image/etc/ssl/certs/ca-certificates.crt"
echo 'hosts: files dns' >"$image/etc/nsswitch.conf"
echo 'lmc:x:65532:65532:lmc:/var/lib/lmc:/usr/bin/lmc' >"$image/etc/passwd"
echo 'lmc:x:65532:' >"$image/etc/group"
mkdir -m 1777 "$image/tmp"
chown 65532:65532 "$image/run/lmc" "$image/var/lib/lmc"
