#!/bin/sh
# Makes a Debian 12 with some packages in a folder, from the mirror in apt's own sources, unless
# the folder has one already. As root; debootstrap comes with tests/install-debian.sh --images.
# usage: debian-root.sh FOLDER PACKAGE[,PACKAGE...]
set -eu
[ $# = 2 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
folder=$1 packages=$2
[ ! -e "$folder.complete" ] || exit 0
# shellcheck disable=SC2016  # apt's own variable
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | head -n 1)
[ -n "$mirror" ] || {
  echo "debian-root.sh: apt's sources name no Debian mirror whose lists are here; add one to /etc/apt/sources.list.d, then run: apt-get update" >&2
  exit 1
}
echo "debian-root.sh: making $folder from $mirror"
rm -rf "$folder"
mkdir -p "$folder"
debootstrap --variant=minbase --include="$packages" bookworm "$folder" "$mirror" >"$folder.log" ||
  { tail -n 5 "$folder.log" >&2; exit 1; }
rm -rf "$folder"/var/cache/apt/* "$folder"/var/lib/apt/lists/*
touch "$folder.complete"
