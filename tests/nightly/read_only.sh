# bash read_only.sh COMMAND...: run it in a mount namespace where this repository cannot be written,
# without any of root's capabilities and without a home.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
cd "$root"
export HOME=/nonexistent
[ "$1" != exec ] || shift
exec setpriv --bounding-set=-all --inh-caps=-all "$@"
