#!/usr/bin/env bash
# Boots a small Debian with systemd as its first process, in namespaces of its own, installs kvd
# there with install.sh, and sees: a wrong setting is tried once, the service runs inside its
# hardening, a frozen broker is ended by the watchdog and started again, chunks outlive that and a
# stop, "started" can wait for the pool, the end is in order, and the runtime directory stays. Needs
# root and debootstrap (tests/install-debian.sh --images).
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=$PWD/build/check
root=$cache/systemd
group=/sys/fs/cgroup/unified
[ -d "$group" ] || group=/sys/fs/cgroup
said() { echo "deploy/systemd/check.sh: $*"; }
[ "$(id -u)" = 0 ] || { said "run it as root"; exit 2; }
command -v debootstrap >/dev/null || { said "debootstrap is missing; run tests/install-debian.sh --images"; exit 2; }

tests/debian-root.sh "$root" systemd,systemd-sysv,dbus,python3,python3-venv
rm -rf "$root"/opt/kvd "$root"/etc/kvd "$root"/var/log/journal "$root"/etc/systemd/system/kvd* "$root/root/kvd"
mkdir -p "$root/root/kvd/wheels"
said "fetching what kvd needs"
make --silent wheels DIST="$root/root/kvd"
.venv/bin/python -m pip download --quiet --dest "$root/root/kvd/wheels" --constraint constraints.txt \
  --python-version 3.11 --only-binary :all: "$(echo "$root"/root/kvd/kvd_offload-*.whl)[daemon,cuda]" \
  2>"$cache/download.log" || { tail -n 5 "$cache/download.log"; exit 1; }
cp -r deploy "$root/root/kvd/"

cat >"$root/root/kvd/boot" <<'BOOT'
set -eu
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do
  touch "$root/dev/$node"
  mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o size=300m,mode=1777 tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
cd "$root"
pivot_root . mnt
umount -l /mnt
exec env -i container=check PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=null
BOOT

mkdir -p "$group/kvd-check"
(
  echo "$BASHPID" >"$group/kvd-check/cgroup.procs"
  exec setsid unshare --fork --pid --mount --uts --ipc --cgroup --net --kill-child=SIGKILL \
    bash "$root/root/kvd/boot" "$root" </dev/null >"$cache/boot.log" 2>&1
) &
unshare=$!
clean() {
  kill -KILL "$unshare" 2>/dev/null || true
  wait "$unshare" 2>/dev/null || true
  for _ in $(seq 50); do # groups are empty a moment after their processes have ended
    find "$group/kvd-check" -depth -type d -exec rmdir {} + 2>/dev/null && break
    sleep 0.1
  done
}
trap clean EXIT
inside() {
  nsenter --target "$first" --mount --uts --ipc --pid --cgroup --net --root \
    env -i --chdir=/ PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PIP_NO_INDEX=1 PIP_FIND_LINKS=/root/kvd/wheels "$@"
}
until first=$(pgrep --parent "$unshare") && inside systemctl is-system-running --wait >/dev/null 2>&1; do
  kill -0 "$unshare" 2>/dev/null || { cat "$cache/boot.log"; exit 1; }
  sleep 0.2
done
said "booted $(inside systemctl --version | head -n 1)"

inside sh -c 'ip link set lo up 2>/dev/null; /root/kvd/deploy/systemd/install.sh "$(echo /root/kvd/kvd_offload-*.whl)[daemon,cuda]" /root/kvd/kvd_offload_tools-*.whl' >/dev/null
inside sh -c 'install -D /root/kvd/deploy/systemd/wait-ready.conf /etc/systemd/system/kvd.service.d/wait-ready.conf
  printf "[Service]\nWatchdogSec=3\n" >/etc/systemd/system/kvd.service.d/check.conf
  systemctl daemon-reload'
fail() { inside journalctl --no-pager --unit kvd --lines 40 ; said "FAILED: $*"; exit 1; }
inside sh -c 'echo "cpu_bytes = \"much\"" >/etc/kvd/kvd.toml'
inside systemctl start kvd 2>/dev/null && fail "a start with a wrong setting"
status=$(inside systemctl show --property ExecMainStatus --value kvd)
[ "$status" = 78 ] || fail "exit status $status of a wrong setting"
inside systemctl is-failed --quiet kvd || fail "a wrong setting was tried again"
said "did not try a wrong setting again"
inside sh -c 'echo "cpu_bytes = \"64MiB\"" >/etc/kvd/kvd.toml'
inside systemctl start kvd || fail "the start"
inside kvd status >/dev/null || fail "ready when started"
said "started and ready, as user $(inside systemctl show --property User --value kvd)"
inside sh -c 'echo "drain_seconds = 5.0" >>/etc/kvd/kvd.toml'
inside systemctl reload kvd || fail "the reload"
inside sh -c 'echo "drain_seconds = -1" >/etc/kvd/kvd.toml'
inside systemctl reload kvd 2>/dev/null && fail "a reload of a wrong file"
inside systemctl is-active --quiet kvd || fail "active after a refused reload"
inside sh -c 'echo "cpu_bytes = \"64MiB\"" >/etc/kvd/kvd.toml'
said "reloaded a right file, refused a wrong one"

awk '/^```python$/ {on = 1; next} /^```$/ {on = 0} on' docs/writing-a-client.md >"$root/root/kvd/engine.py"
inside /opt/kvd/bin/python /root/kvd/engine.py /run/kvd >/dev/null || fail "an engine"
inside kvd selftest >/dev/null || fail "kvd selftest"
ready() { inside kvd status --json | python3 -c 'import json, sys; print(sum(n["chunks"]["ready"] for n in json.load(sys.stdin)["namespaces"]))'; }
stored=$(ready)
[ "$stored" -gt 0 ] || fail "chunks of the engine"
said "an engine stored $stored chunks, and loaded them"

before=$(inside systemctl show --property MainPID --value kvd)
inside sh -c "kill -STOP $before"
for _ in $(seq 100); do
  after=$(inside systemctl show --property MainPID --value kvd)
  [ "$after" != "$before" ] && [ "$after" != 0 ] && break
  sleep 0.2
done
[ "$after" != "$before" ] || fail "the watchdog"
inside systemctl start kvd || fail "the start after the watchdog" # waits for the one under way
inside kvd status >/dev/null || fail "ready after the watchdog"
# Python's own words for a stack, and the package: neither file nor function, which may be renamed.
stack=$(inside journalctl --no-pager --output cat --unit kvd | sed -n '/^Fatal Python error: Aborted/,/^Extension modules/p')
grep -q 'File ".*/site-packages/kvd/server/' <<<"$stack" || fail "the loop's stack in the journal"
[ "$(ready)" = "$stored" ] || fail "chunks after the watchdog: $(ready) of $stored"
said "a frozen broker was ended and started again, with its $stored chunks"

inside systemctl stop kvd || fail "the stop"
result=$(inside systemctl show --property Result --value kvd)
[ "$result" = success ] || fail "the end: $result"
[ "$(inside stat --format '%U %G %a' /run/kvd)" = "kvd kvd 750" ] || fail "the runtime directory"
inside systemctl start kvd || fail "the second start"
[ "$(ready)" = "$stored" ] || fail "chunks after a stop: $(ready) of $stored"
inside systemctl stop kvd || fail "the second stop"
inside runuser --user kvd -- /opt/kvd/bin/kvd purge >/dev/null || fail "kvd purge"
[ -z "$(ls -A "/proc/$first/root/dev/shm")" ] || fail "left in /dev/shm: $(ls -A "/proc/$first/root/dev/shm")"
said "chunks outlived a stop; kvd purge gave their memory back"
[ -z "$(inside systemctl --failed --plain --no-legend)" ] || fail "units: $(inside systemctl --failed)"
said "ok"
