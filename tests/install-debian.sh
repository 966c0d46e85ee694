#!/bin/sh
# Installs what some tests need beyond Python, on Debian and its like: only what is missing,
# and only as root. Without it those tests are skipped and name this script.
#   promtool                       alert rules                    tests/deploy
#   systemd-analyze                the unit                       tests/deploy
#   chromium                       the status page                tests/http
#   ip, unshare, setpriv           nodes with own networks        tests/tier
#   libibverbs librdmacm libnuma libcurl   Mooncake Store         tests/tier
#   cc, msgpack for C              a client in C                  tests/c_client
#   fio                            a disk tier's speed            bench/disk.py
#   buildah podman runc catatonit debootstrap   the image         make check-deploy
set -eu
missing=
want() { # package, and the program that shows it is there
  command -v "$2" >/dev/null 2>&1 || missing="$missing $1"
}
want prometheus promtool
want systemd systemd-analyze
want chromium chromium
want gcc cc
want fio fio
want iproute2 ip
want util-linux unshare
for library in libibverbs1:libibverbs.so.1 librdmacm1:librdmacm.so.1 libnuma1:libnuma.so.1 \
  libcurl4:libcurl.so.4; do
  ldconfig -p 2>/dev/null | grep -q "${library#*:}" || missing="$missing ${library%%:*}"
done
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
[ -e /usr/include/msgpack.h ] || missing="$missing libmsgpack-dev"
if [ "${1:-}" = --images ]; then
  want buildah buildah
  want podman podman
  want runc runc
  want debootstrap debootstrap
  [ -e /usr/libexec/podman/catatonit ] || missing="$missing catatonit"
fi
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "install-debian.sh: tests will be skipped for want of:$missing" >&2
  exit 0
fi
echo "install-debian.sh: from Debian's archive:$missing" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# Debian 13 has renamed it.
! apt-cache show libmsgpack-c-dev >/dev/null 2>&1 ||
  missing=$(echo "$missing" | sed 's/libmsgpack-dev/libmsgpack-c-dev/')
# shellcheck disable=SC2086  # a list of packages
apt-get install -y -q --no-install-recommends $missing
