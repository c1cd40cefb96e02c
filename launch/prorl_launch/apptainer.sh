#!/usr/bin/env bash
# Install a working, rootless Apptainer on a Debian or Ubuntu that has none.
#
#   apptainer.sh                  install; does nothing but a quick check where it works already
#   apptainer.sh --if-possible    the same where that needs no password; a failure is a loud warning, never an error
#   apptainer.sh --check          only the check: can root and an unprivileged user start a container?
#   apptainer.sh --force          build the package again and reinstall
#
# A release that has the package gets its own. Otherwise the package of Debian's unstable suite is read through a private
# apt root (this machine's apt sources, pins and C library stay as they are), and repacked with private copies of the
# libraries that it links to, because those are newer than this release's. Files land at Debian's usual places, and
# `apt-get remove apptainer` undoes it. The repacked .deb is kept in the cache folder: the next time needs no network.
#
# Settings: PRORL_CACHE_DIR; APPTAINER_DEBIAN_MIRROR (where this machine's own sources are not Debian's: the URL of any
# mirror of Debian's archive); APPTAINER_SUITES (default "sid").
set -Eeuo pipefail

readonly SUITES=${APPTAINER_SUITES:-sid}
readonly REVISION=prorl1 # raise it when the repacking below changes
readonly HELPERS=(ca-certificates squashfs-tools squashfuse fuse-overlayfs fuse2fs fuse3 uidmap)
readonly UNPRIVILEGED_UID=65534

say() { echo "apptainer: $*"; }
die() {
    echo "apptainer: ERROR: $*" >&2
    exit 1
}
trap 'echo "apptainer: line $LINENO: \"$BASH_COMMAND\" failed" >&2' ERR

# ---------------------------------------------------------------- does it work?

is_installed() { command -v apptainer >/dev/null && apptainer --version >/dev/null 2>&1; }

# An empty root with this machine's /usr in it: needs no image. Started as an unprivileged user too where we may become one.
starts_containers() {
    local root=$WORK/root link
    mkdir -p "$root"/{usr,dev,proc,sys,tmp,etc,root,home,var/tmp}
    for link in bin sbin lib lib32 lib64; do
        if [ -L "/$link" ] && [ ! -e "$root/$link" ]; then ln -s "usr/$link" "$root/$link"; fi
    done
    local run=(apptainer --quiet exec --userns --containall --no-home --cwd / --bind /usr:/usr:ro "$root" /usr/bin/true)
    "${run[@]}" 2>"$WORK/error" || return 1
    [ "$(id -u)" = 0 ] || return 0
    (cd / && setpriv --reuid=$UNPRIVILEGED_UID --regid=$UNPRIVILEGED_UID --clear-groups \
        env -i HOME=/ PATH="$PATH" "${run[@]}" 2>"$WORK/error")
}

# ---------------------------------------------------------------- packages of this release

has_package() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }

apt_install() { # silent unless it fails; once more after apt-get update
    local command=(apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 "$@")
    "${command[@]}" >>"$WORK/apt.log" 2>&1 && return 0
    apt-get update -q >>"$WORK/apt.log" 2>&1 || true
    "${command[@]}" >>"$WORK/apt.log" 2>&1 && return 0
    tail -n 25 "$WORK/apt.log" >&2
    die "'${command[*]}' failed"
}

install_packages() {
    local package missing=()
    for package in "$@"; do
        has_package "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing these system packages: ${missing[*]}"
    apt_install "${missing[@]}"
}

# ---------------------------------------------------------------- the package of Debian's unstable suite, repacked

debian_mirror() {
    if [ -n "${APPTAINER_DEBIAN_MIRROR:-}" ]; then
        echo "$APPTAINER_DEBIAN_MIRROR"
        return
    fi
    # shellcheck disable=SC2016  # apt's own placeholders
    apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(REPO_URI)' 'Created-By: Packages' |
        awk -F '|' '$1 == "Debian" && $2 == "Debian" {print $3; exit}'
}

open_private_apt() {
    local apt_root=$WORK/apt mirror keyring suite
    mirror=$(debian_mirror)
    [ -n "$mirror" ] || die "this machine's apt sources have neither apptainer nor Debian's archive. Set" \
        "APPTAINER_DEBIAN_MIRROR to the URL of a Debian mirror, or install Apptainer's own package for this system"
    install_packages debian-archive-keyring
    keyring=$(find /usr/share/keyrings -name 'debian-archive-keyring.*' | head -n 1)
    [ -n "$keyring" ] || die "debian-archive-keyring has no keyring in /usr/share/keyrings"
    mkdir -p "$apt_root"/etc/{apt.conf.d,sources.list.d,preferences.d,trusted.gpg.d} \
        "$apt_root"/state/lists/partial "$apt_root"/cache/archives/partial
    : >"$apt_root/status"
    for suite in $SUITES; do
        echo "deb [arch=$ARCH signed-by=$keyring] $mirror $suite main"
    done >"$apt_root/etc/sources.list"
    # Keep proxies. Signatures are checked; the expiry date is not: unstable's lasts a week, and mirrors and clocks lag.
    apt-config dump Acquire::http Acquire::https Acquire::Retries >"$apt_root/apt.conf" 2>/dev/null || true
    cat >>"$apt_root/apt.conf" <<EOF
Dir::Etc "$apt_root/etc"; Dir::Etc::sourcelist "$apt_root/etc/sources.list"; Dir::Etc::sourceparts "$apt_root/etc/sources.list.d";
Dir::Etc::preferences "$apt_root/etc/preferences"; Dir::Etc::preferencesparts "$apt_root/etc/preferences.d";
Dir::Etc::parts "$apt_root/etc/apt.conf.d"; Dir::State "$apt_root/state"; Dir::State::status "$apt_root/status";
Dir::Cache "$apt_root/cache"; Acquire::Languages "none"; Acquire::Check-Valid-Until "false"; APT::Sandbox::User "root";
APT::Architecture "$ARCH"; APT::Architectures { "$ARCH"; };
EOF
    private_apt apt-get update -q >>"$WORK/apt.log" 2>&1 || {
        tail -n 15 "$WORK/apt.log" >&2
        die "cannot read the package index of $SUITES from Debian's archive"
    }
}
private_apt() { APT_CONFIG=$WORK/apt/apt.conf "$@"; }

# Copies every library that the files $2... need, and those need in turn, from folder tree $POOL to $1.
copy_libraries() {
    local target=$1 wanted=() name found
    shift
    mapfile -t wanted < <(for found in "$@"; do patchelf --print-needed "$found"; done)
    while [ ${#wanted[@]} -gt 0 ]; do
        name=${wanted[-1]}
        unset 'wanted[-1]'
        [ ! -e "$target/$name" ] || continue
        found=$(find "$POOL" -name "$name" \( -type f -o -type l \) | head -n 1)
        [ -n "$found" ] || die "apptainer needs $name, which none of the downloaded libraries has"
        cp -L "$found" "$target/$name"
        mapfile -t -O ${#wanted[@]} wanted < <(patchelf --print-needed "$target/$name" 2>/dev/null)
    done
}

# The library is preloaded into this release's fuse2fs (a writable layer inside a SIF), so it must fit this release's C
# library. Of a newer one it only wants C23's strtol: bind that to plain strtol (name, version, hash of the version).
fit_preload() {
    local library=$1
    fits() { [ -z "$(LD_PRELOAD=$library /bin/true 2>&1)" ]; }
    if [ ! -f "$library" ] || fits; then return 0; fi
    perl -0777 -pi -e 's/__isoc23_strtol\0/"strtol".("\0"x10)/ge; s/GLIBC_2\.38\0/GLIBC_2.34\0/g; s/\xb8\x91\x96\x06/\xb4\x91\x96\x06/g' "$library"
    patchelf --clear-symbol-version strtol "$library"
    fits || {
        rm -f "$library"
        say "note: SIF images with a writable layer inside will not run here"
    }
}

rewrite_control() { # drops what is bundled from Depends; $1 version, $2 bundled
    awk -v version="$1" -v bundled="$2" '
        /^(Static-)?Built-Using:/ {skip = 1; next}
        /^[^ ]/ {skip = 0}
        skip {next}
        /^Version:/ {print "Version: " version; next}
        /^Depends:/ {
            sub(/^Depends: /, ""); n = split($0, all, /, */); kept = ""
            for (i = 1; i <= n; i++)
                if (all[i] !~ /^lib/ && all[i] !~ /^containernetworking-plugins/) kept = kept (kept == "" ? "" : ", ") all[i]
            print "Depends: " kept; next
        }
        /^Recommends:/ {print $0 ", containernetworking-plugins, squashfuse, fuse-overlayfs, fuse2fs, fuse3"; next}
        /^Description:/ {print; print " Repacked for an older release; private copies of: " bundled; print " ."; next}
        {print}' "$UNPACKED/DEBIAN/control" >"$WORK/control"
    mv "$WORK/control" "$UNPACKED/DEBIAN/control"
}

build_package() { # leaves the repacked .deb in $CACHE
    local version requirement libraries=() file bundled='' starter private interpreter
    readonly UNPACKED=$WORK/unpacked POOL=$WORK/pool
    mkdir -p "$UNPACKED" "$POOL" "$WORK/downloads"
    install_packages patchelf perl
    open_private_apt
    version=$(private_apt apt-cache policy apptainer | awk '/Candidate:/ {print $2}')
    case $version in '' | '(none)') die "no apptainer for $ARCH in Debian's $SUITES (is the network reachable?)" ;; esac
    # Every library it depends on comes from the same suite, so each is new enough.
    for requirement in $(private_apt apt-cache show "apptainer=$version" | sed -n 's/^Depends: //p' | head -n 1 |
        tr ',' '\n' | awk '{print $1}'); do
        case $requirement in lib*) libraries+=("$requirement") ;; esac
    done
    say "repacking apptainer $version with private copies of ${libraries[*]}"
    (cd "$WORK/downloads" && private_apt apt-get download -q "apptainer=$version" "${libraries[@]}") >>"$WORK/apt.log" 2>&1 || {
        tail -n 15 "$WORK/apt.log" >&2
        die "download failed; run it again"
    }
    for file in "$WORK"/downloads/*.deb; do
        if [ "$(dpkg-deb -f "$file" Package)" = apptainer ]; then
            dpkg-deb -R "$file" "$UNPACKED"
        else
            dpkg-deb -x "$file" "$POOL"
            bundled+="$(dpkg-deb -f "$file" Package) (= $(dpkg-deb -f "$file" Version)), "
        fi
    done
    starter=$(cd "$UNPACKED" && find usr -path '*apptainer/bin/starter' -type f)
    [ -n "$starter" ] && [ -x "$UNPACKED/usr/bin/apptainer" ] || die "apptainer $version has an unexpected layout"
    private=/${starter%/bin/starter}/private-lib
    mkdir -p "$UNPACKED$private"
    interpreter=$(basename "$(patchelf --print-interpreter "$UNPACKED/usr/bin/apptainer")")
    cp -L "$(find "$POOL" -name "$interpreter" | head -n 1)" "$UNPACKED$private/$interpreter"
    chmod 755 "$UNPACKED$private/$interpreter"
    copy_libraries "$UNPACKED$private" "$UNPACKED/usr/bin/apptainer" "$UNPACKED/$starter"
    # RPATH rather than RUNPATH: it holds for the libraries' own needs too, and beats LD_LIBRARY_PATH.
    for file in "$UNPACKED/usr/bin/apptainer" "$UNPACKED/$starter"; do
        patchelf --set-interpreter "$private/$interpreter" --force-rpath --set-rpath "$private" "$file"
    done
    fit_preload "$UNPACKED/${starter%/bin/starter}/lib/offsetpreload.so"
    rewrite_control "$version+$REVISION" "${bundled%, }"
    rm -rf "$UNPACKED/DEBIAN/md5sums" "$UNPACKED/usr/share/man" "$UNPACKED/usr/share/lintian"
    file=apptainer_$version+${REVISION}_$ARCH.deb
    dpkg-deb --root-owner-group -Zxz -z3 -b "$UNPACKED" "$WORK/$file" >>"$WORK/apt.log" 2>&1 || die "dpkg-deb failed"
    mv "$WORK/$file" "$CACHE/.$file"
    mv "$CACHE/.$file" "$CACHE/$file"
    if [ -n "${SUDO_UID:-}" ]; then chown "$SUDO_UID" "$CACHE" "$CACHE/$file"; fi
}

cached_package() { find "$CACHE" -maxdepth 1 -name "apptainer_*_$ARCH.deb" -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-; }

# ---------------------------------------------------------------- install

install_apptainer() {
    if ! command -v apt-get dpkg-deb >/dev/null; then die "needs Debian or Ubuntu (apt-get, dpkg-deb)"; fi
    ARCH=$(dpkg --print-architecture)
    mkdir -p "$CACHE"
    install_packages "${HELPERS[@]}"
    if [ -z "$FORCE" ] && apt-get install -s -q apptainer >/dev/null 2>&1 && ! has_package apptainer; then
        install_packages apptainer
    else
        if [ -n "$FORCE" ] || [ -z "$(cached_package)" ]; then build_package; fi
        local package
        package=$(cached_package)
        say "installing the system package $(basename "$package")"
        apt_install --allow-downgrades --reinstall \
            -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "$package"
    fi
    is_installed || die "installed, but it does not run: $(apptainer --version 2>&1 | head -n 3)"
    # SIF images are mounted through FUSE by users without any right.
    [ -e /dev/fuse ] || mknod /dev/fuse c 10 229 2>/dev/null || say "warning: no /dev/fuse here, so no SIF images"
    [ ! -e /dev/fuse ] || chmod 666 /dev/fuse || say "warning: /dev/fuse is for root only, so no SIF images for users"
}

explain_failure() {
    cat "$WORK/error" >&2
    die "$(apptainer --version) is installed but starts no container; \`prorl-trio doctor\` says more about user namespaces"
}

main() {
    local mode=install
    FORCE=
    CACHE=${PRORL_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/prorl-trio}/apptainer
    while [ $# -gt 0 ]; do
        case $1 in
        --if-possible) mode=if-possible ;;
        --check) mode=check ;;
        --force) FORCE=--force ;;
        --cache) CACHE=${2:?--cache needs a folder} && shift ;;
        *) sed -n '2,/^set /{/^#/p}' "$0" >&2 && exit 2 ;;
        esac
        shift
    done
    WORK=$(mktemp -d /tmp/prorl-apptainer.XXXXXX)
    chmod 755 "$WORK"
    trap 'rm -rf "$WORK"' EXIT
    export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8

    if [ -z "$FORCE" ] && is_installed && starts_containers; then
        say "$(apptainer --version) works"
        return
    fi
    case $mode in
    check)
        is_installed || die "not installed; run \`prorl-trio setup apptainer\`"
        explain_failure
        ;;
    if-possible)
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && "$0" --cache "$CACHE"; then return; fi
        say "************************************************************************************" >&2
        say "WARNING: no working Apptainer, and it could not be installed here (root and apt are" >&2
        say "WARNING: needed; see above). Tests of the Apptainer sandbox will be SKIPPED." >&2
        say "************************************************************************************" >&2
        ;;
    install)
        if [ "$(id -u)" != 0 ]; then
            command -v sudo >/dev/null || die "must be root: it installs system packages (running containers needs no root)"
            say "needs root to install system packages; asking sudo"
            sudo --preserve-env=APPTAINER_DEBIAN_MIRROR,APPTAINER_SUITES "$0" --cache "$CACHE" $FORCE
            return
        fi
        install_apptainer
        starts_containers || explain_failure
        say "$(apptainer --version) works"
        ;;
    esac
}

main "$@"
