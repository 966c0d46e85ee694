#!/usr/bin/env bash
# Builds docker/Dockerfile and runs it as docker/compose.yaml would, without a Docker engine:
# the daemon as its own user without any capability on a read-only root, its healthcheck, an
# engine in a second container, and the end by SIGTERM. Prints the size. Needs root; the tools
# come with tests/install-debian.sh --images.
# usage: docker/check.sh            BASE=python:3.11-slim-bookworm docker/check.sh
#   without BASE the image is built on Debian's own Python, for machines without a registry.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=$PWD/build/check
image=localhost/kvd-check
work=$(mktemp -d)
said() { echo "docker/check.sh: $*"; }

for need in buildah podman runc debootstrap; do
  command -v "$need" >/dev/null || { said "$need is missing; run tests/install-debian.sh --images"; exit 2; }
done
[ "$(id -u)" = 0 ] || { said "run it as root"; exit 2; }

podman() { (cd / && command podman --runtime runc "$@"); }
run() { # name, options and command: limits that this machine allows, no network
  podman run --detach --no-healthcheck --network none --read-only --cap-drop all \
    --security-opt no-new-privileges --ulimit "nofile=$(ulimit -Hn)" --ulimit nproc=4096 --name "$@"
}
clean() {
  # The owner of the numbering last: it cannot go before those who use it.
  podman rm --force --ignore --time 0 kvd-check-engine kvd-check-kvd >/dev/null 2>&1 || true
  podman rm --force --ignore --time 0 kvd-check-pids >/dev/null 2>&1 || true
  podman volume rm --force kvd-check >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap clean EXIT
clean
mkdir -p "$work"

if [ -z "${BASE:-}" ]; then
  BASE=localhost/kvd-check-base
  tests/debian-root.sh "$cache/root" python3,python3-pip,python3-venv
  ln -sf /usr/bin/python3 "$cache/root/usr/local/bin/python"
  said "fetching what kvd needs"
  make --silent wheels DIST="$work"
  .venv/bin/python -m pip download --quiet --dest "$cache/wheels" --constraint constraints.txt \
    --python-version 3.11 --only-binary :all: hatchling setuptools \
    "$(echo "$work"/kvd_offload-*.whl)[daemon,cuda]" 2>"$work/download.log" \
    || { tail -n 5 "$work/download.log"; exit 1; }
  rm -f "$cache"/wheels/kvd_offload-*
  base=$(buildah from scratch)
  buildah add --quiet "$base" "$cache/root" / >/dev/null
  buildah add --quiet "$base" "$cache/wheels" /wheelhouse >/dev/null
  buildah config --env PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    --env PIP_BREAK_SYSTEM_PACKAGES=1 --env PIP_NO_INDEX=1 --env PIP_FIND_LINKS=/wheelhouse "$base"
  buildah commit --quiet --rm "$base" "$BASE" >/dev/null
fi

said "building"
buildah bud --isolation chroot --format docker --ignorefile docker/Dockerfile.dockerignore \
  --build-arg "PYTHON=$BASE" --file docker/Dockerfile --tag "$image" . >"$work/build.log" 2>&1 \
  || { tail -n 30 "$work/build.log"; exit 1; }

said "running"
podman volume create kvd-check >/dev/null
run kvd-check-pids --entrypoint '["sleep", "infinity"]' --init "$image" >/dev/null
run kvd-check-kvd --pid container:kvd-check-pids --tmpfs /tmp --tmpfs /var/lib/kvd \
  --shm-size 80m --env KVD_CPU_BYTES=64MiB --volume kvd-check:/run/kvd "$image" >/dev/null
# The image's own healthcheck, as the engine would run it.
mapfile -t health < <(podman image inspect "$image" --format '{{json .HealthCheck.Test}}' \
  | python3 -c 'import json, sys; print(*json.load(sys.stdin)[1:], sep="\n")')
for attempt in $(seq 120); do
  podman exec kvd-check-kvd "${health[@]}" >"$work/health" 2>&1 && break
  [ "$attempt" -lt 120 ] || { cat "$work/health"; podman logs kvd-check-kvd; exit 1; }
  sleep 0.25
done
said "healthy: $(tail -n 1 "$work/health")"
[ "$(podman exec kvd-check-kvd id -u)" = 9330 ]
podman exec kvd-check-kvd grep -q '^CapEff:.0*$' /proc/self/status
podman exec kvd-check-kvd sh -c '! python -m pip --version && ! python -c "import torch"' 2>/dev/null

# An engine of another user, with the group alone and the volume read-only.
awk '/^```python$/ {on = 1; next} /^```$/ {on = 0} on' docs/writing-a-client.md >"$work/engine.py"
chmod 755 "$work" && chmod 644 "$work/engine.py"
run kvd-check-engine --pid container:kvd-check-pids --user 4711:4711 --group-add 9330 \
  --volume kvd-check:/run/kvd:ro --volume "$work/engine.py:/engine.py:ro" \
  --entrypoint '["python", "/engine.py", "/run/kvd"]' "$image" >/dev/null
[ "$(podman wait kvd-check-engine)" = 0 ] || { podman logs kvd-check-engine; exit 1; }
said "an engine in a second container: $(podman logs kvd-check-engine | tail -n 1)"

podman stop --time 90 kvd-check-kvd >/dev/null
[ "$(podman inspect kvd-check-kvd --format '{{.State.ExitCode}}')" = 0 ]
said "ended in order"

size() { podman image inspect "$1" --format '{{.Size}}'; }
added=$(($(size "$image") - $(size "$BASE")))
megabytes=$((added / 1000000))
quoted=$(sed -n 's/.*adds \*\*\([0-9]*\) MB\*\*.*/\1/p' docker/README.md)
[ $((megabytes - quoted)) -le 5 ] && [ $((quoted - megabytes)) -le 5 ] \
  || { said "FAILED: kvd adds $megabytes MB to its base image, docker/README.md says $quoted"; exit 1; }
said "ok: kvd adds $megabytes MB to its base image"
