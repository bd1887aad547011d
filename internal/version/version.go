// Package version contains the version of Capstan.
//
// Layer: library. Allowed imports: api.
package version

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/mod/semver"
)

// Version of Capstan, which capstand reports, and of its providers in clusterctl's inventory. Set with -ldflags -X.
var Version = "v0.1.0"

// InstallPrograms says how to get programs of Capstan that are missing on a box.
const InstallPrograms = "install the packages capstan and capstan-kubernetes-…, unpack the archive of the release, run `make build`, or set --assets to the folder with the programs"

// Newest returns the newer one of a version and that of this program. An empty version is older than all others.
func Newest(other string) string {
	if semver.Compare(other, Version) > 0 {
		return other
	}
	return Version
}

// HostFile is the file in the state folder of a capstand with the newest version that has had the folder.
const HostFile = "version"

// WriterOfHost returns the version in HostFile; empty if it is not known.
func WriterOfHost(folder string) string {
	data, _ := os.ReadFile(filepath.Join(folder, HostFile))
	return strings.TrimSpace(string(data))
}

// CheckWriter returns an error if a newer minor release has written data that this program is about to use: the data can have settings that
// this program would ignore and remove. Patch releases do not add any. what names the data.
func CheckWriter(writer, what string) error {
	if semver.Compare(semver.MajorMinor(writer), semver.MajorMinor(Version)) <= 0 {
		return nil
	}
	return fmt.Errorf("expected Capstan %s or newer for %s, which that release has written, found %s: install %s again", semver.MajorMinor(writer), what, Version, writer)
}
