// Package templates embeds the cluster templates, in the form that clusterctl reads.
//
// Layer: library.
package templates

import "embed"

// FS holds cluster-template.yaml and its flavors.
//
//go:embed *
var FS embed.FS
