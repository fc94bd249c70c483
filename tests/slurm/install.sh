#!/bin/sh
# Installs what tests/slurm needs, where it is missing and can be: Debian's and Ubuntu's names, as
# root. The tests themselves say what is still missing afterwards.
PATH=$PATH:/usr/sbin:/sbin
missing=
for name in munged slurmctld slurmd sbatch ip; do
  command -v "$name" >/dev/null || missing="$missing $name"
done
if [ -z "$missing" ]; then exit 0; fi
echo "installing Slurm, for:$missing"
if ! { apt-get update -qq &&
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client munge iproute2; } >/dev/null; then
  echo "could not install Slurm; the tests will skip" >&2
fi
exit 0
