#!/bin/sh
# Installs kvd as a service: a user, /opt/kvd, the unit and its settings. Run it again to upgrade.
# usage: install.sh CHECKOUT-OR-WHEEL... [PIP OPTIONS...]   such as: install.sh '.[daemon,cuda]' ./client/tools
set -eu
[ $# -ge 1 ] || { sed -n '2,3p' "$0" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "install.sh: run it as root" >&2; exit 1; }
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python3}
umask 022 # what is made here is for user kvd to read

# Whether user kvd can run something; what lies below /root it cannot.
kvd_runs() { (cd / && runuser -u kvd -- "$@" >/dev/null 2>&1); }

install -D -m 644 "$here/kvd.sysusers.conf" /usr/lib/sysusers.d/kvd.conf
systemd-sysusers kvd.conf

if [ ! -x /opt/kvd/bin/python ]; then
  found=$(command -v "$python") || { echo "install.sh: there is no $python; name one: PYTHON=/usr/bin/python3 $0 $*" >&2; exit 1; }
  kvd_runs "$found" -c 'import encodings, json' || {
    echo "install.sh: user kvd cannot run $found ($(readlink -f "$found")); name a Python that it can: PYTHON=/usr/bin/python3 $0 $*" >&2
    exit 1
  }
  "$found" -m venv /opt/kvd
fi
/opt/kvd/bin/python -m pip install --quiet --upgrade "$@"
kvd_runs /opt/kvd/bin/kvd --version || {
  echo "install.sh: user kvd cannot run /opt/kvd/bin/kvd, whose Python is $(readlink -f /opt/kvd/bin/python); rm -r /opt/kvd, then: PYTHON=/usr/bin/python3 $0 $*" >&2
  exit 1
}

install -D -m 644 "$here/kvd.tmpfiles.conf" /usr/lib/tmpfiles.d/kvd.conf
install -D -m 644 "$here/kvd.service" /etc/systemd/system/kvd.service
systemd-tmpfiles --create kvd.conf
ln -sf /opt/kvd/bin/kvd /usr/local/bin/kvd

if [ ! -e /etc/kvd/kvd.toml ]; then
  install -D -m 640 -g kvd "$here/../kvd.toml" /etc/kvd/kvd.toml
fi
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  echo "installed; next: systemctl enable --now kvd   (after an upgrade: systemctl restart kvd)"
fi
