// Package version contains the version of Capstan.
//
// Layer: library. Allowed imports: api.
package version

// Version of Capstan, and of its providers in clusterctl's inventory. Set with -ldflags -X.
var Version = "v0.1.0"
