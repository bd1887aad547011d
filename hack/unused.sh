#!/usr/bin/env bash
# Fails if an installation of this box uses the programs in a folder. Machines mount this folder and start programs from it.
#
#   hack/unused.sh FOLDER [STATE]
#
# The state file of the installation in /var/lib/capstan (STATE) contains its folder. Installations with another root folder
# are found only while their capstand runs.
set -euo pipefail

folder=$(realpath -m "$1") state=${2:-/var/lib/capstan/state.json}

refuse() {
	echo "$1 runs from $folder, and its machines use the programs there: remove it first with \`$folder/capstan${2:+ --root $2} down\`, or install its programs elsewhere and run \`capstan up\` from there" >&2
	exit 1
}

# Only root can read the state. Other users depend on the running processes.
if grep -qsF "\"assets\": \"$folder\"" "$state"; then
	refuse "the installation in $(dirname "$state")"
fi
for file in /proc/[0-9]*/cmdline; do
	{ mapfile -d '' -t arguments <"$file"; } 2>/dev/null || continue # the process has ended
	uses=false root=
	for argument in "${arguments[@]}"; do
		case $argument in
		"--assets=$folder") uses=true ;;
		--root=*) root=${argument#--root=} ;;
		esac
	done
	if $uses && [[ ${arguments[0]} == */capstand ]]; then
		# The host's folder is hosts/NAME in that of the installation.
		refuse "the capstand of $root" "${root%/hosts/*}"
	fi
done
