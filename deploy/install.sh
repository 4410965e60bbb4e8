#!/usr/bin/env bash
# Installs Stockade on a host without dpkg (RHEL, Fedora, SUSE, Arch): sudo deploy/install.sh
#
#   deploy/install.sh             installs, or upgrades and reloads a running worker
#   deploy/install.sh --remove    removes the program; configuration and state stay
#   deploy/install.sh --purge     removes everything
#
# Needs python3 (3.11 to 3.13) with its headers, gcc, a static C library and libcap's headers:
#   dnf install python3.11 python3.11-devel gcc glibc-static libcap-devel      (then PYTHON=python3.11)
# The program is a virtual environment of its own in /opt/stockade, or in PREFIX, which must end with
# /stockade. Nothing is enabled or started.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
prefix=${PREFIX:-/opt/stockade}
usr=/usr/local
die() { echo "install.sh: $*" >&2; exit 1; }
# All of it is removed by --remove.
[[ $prefix == /*/stockade ]] || die "cannot install into $prefix: PREFIX must be absolute and end with /stockade"
((EUID == 0)) || die "cannot install as uid $EUID: run it as root"

# Not so while an image is made.
booted() { [[ -d /run/systemd/system ]]; }

remove() {
    local made=()
    [[ -r $prefix/directories ]] && mapfile -t made < <(sort -r "$prefix/directories")
    # Drains, as the unit's stop does.
    booted && { systemctl disable --now stockade.service 2>/dev/null || true; }
    rm -rf "$prefix" "$usr/bin/stockade" /etc/systemd/system/stockade.service{,.d/10-backoff.conf} \
        /etc/sysusers.d/stockade.conf /etc/tmpfiles.d/stockade.conf "$usr"/share/man/man1/stockade{,-*}.1.gz \
        "$usr/share/bash-completion/completions/stockade" "$usr/share/zsh/vendor-completions/_stockade" \
        "$usr/share/fish/vendor_completions.d/stockade.fish"
    for directory in "${made[@]}"; do
        rmdir "$directory" 2>/dev/null || true # somebody else's by now, when it is not empty
    done
    booted && systemctl daemon-reload
    return 0
}

case ${1:-} in
    --remove) remove; exit ;;
    --purge)
        remove
        rm -rf /etc/stockade /var/lib/stockade /run/stockade
        if getent passwd stockade >/dev/null; then userdel stockade; fi
        exit
        ;;
    "") ;;
    *) die "unknown argument $1: --remove, --purge or none" ;;
esac

command -v dpkg >/dev/null && [[ -z ${STOCKADE_FORCE:-} ]] &&
    die "this host has dpkg: build a package with deploy/build-deb (or set STOCKADE_FORCE=1)"
python=$(command -v "${PYTHON:-python3}") || die "cannot find ${PYTHON:-python3}: name one in PYTHON"

# Beside the old one, which runs until the new one is whole, and is then exchanged for it by renames.
mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$prefix.XXXXXX")
trap 'rm -rf "$work"' EXIT
"$here/bundle" "$work" "$prefix" "$python"
"$here/finish" "$work" "$prefix" "$usr"
# The directories that are made for it, which --remove takes away again.
{
    [[ ! -r $prefix/directories ]] || cat "$prefix/directories"
    (cd "$work" && find etc usr -mindepth 1 -type d) | while read -r directory; do
        [[ -d /$directory ]] || echo "/$directory"
    done
} | sort -u >"$work/directories"
mv "$work/directories" "$work$prefix/directories"
if [[ -d $prefix ]]; then
    mv "$prefix" "$work/old"
fi
mv "$work$prefix" "$prefix"
cp -a "$work/etc" "$work/usr" /
mkdir -p /etc/stockade
[[ -e /etc/stockade/stockade.toml ]] || install -m 640 "$here/stockade.toml" /etc/stockade/stockade.toml
systemd-sysusers stockade.conf
systemd-tmpfiles --create stockade.conf
# Of hosts with SELinux: files that came from elsewhere get the labels of where they are.
command -v restorecon >/dev/null && restorecon -R "$prefix" /etc/stockade /etc/systemd/system "$usr/bin/stockade"
booted && systemctl daemon-reload
if booted && systemctl --quiet is-active stockade.service; then
    systemctl reload stockade.service
else
    echo "installed: edit /etc/stockade/stockade.toml, then systemctl enable --now stockade"
fi
