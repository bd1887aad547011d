// Package version contains the version of Capstan.
//
// Layer: library. Allowed imports: api.
package version

// Version of Capstan, which capstand reports, and of its providers in clusterctl's inventory. Set with -ldflags -X.
var Version = "v0.1.0"

// InstallPrograms says how to get programs of Capstan that are missing on a box.
const InstallPrograms = "install the packages capstan and capstan-kubernetes-…, unpack the archive of the release, run `make build`, or set --assets to the folder with the programs"
