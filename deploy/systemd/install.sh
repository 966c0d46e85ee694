#!/bin/sh
# Installs kvd as a service: a user, /opt/kvd, the unit and its settings. Run it again to upgrade.
# usage: install.sh WHEEL-OR-NAME [PIP OPTIONS...]   such as: install.sh 'kvd-offload[daemon,cuda]'
set -eu
[ $# -ge 1 ] || { sed -n '2,3p' "$0" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "install.sh: run it as root" >&2; exit 1; }
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python3}

install -D -m 644 "$here/kvd.sysusers.conf" /usr/lib/sysusers.d/kvd.conf
install -D -m 644 "$here/kvd.tmpfiles.conf" /usr/lib/tmpfiles.d/kvd.conf
install -D -m 644 "$here/kvd.service" /etc/systemd/system/kvd.service
systemd-sysusers kvd.conf
systemd-tmpfiles --create kvd.conf

[ -x /opt/kvd/bin/python ] || "$python" -m venv /opt/kvd
/opt/kvd/bin/python -m pip install --quiet --upgrade "$@"
ln -sf /opt/kvd/bin/kvd /usr/local/bin/kvd

if [ ! -e /etc/kvd/kvd.toml ]; then
  install -D -m 640 -g kvd "$here/../kvd.toml" /etc/kvd/kvd.toml
fi
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  echo "installed; next: systemctl enable --now kvd   (after an upgrade: systemctl restart kvd)"
fi
