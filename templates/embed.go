// Package templates embeds the cluster templates, in the form that clusterctl reads.
//
// Layer: library. Allowed imports: api.
package templates

import "embed"

// FS contains cluster-template.yaml, its flavors and the ClusterClass.
//
//go:embed *
var FS embed.FS
