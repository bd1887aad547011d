// Package config embeds the manifests of the providers: config/<provider>/{crd/bases,rbac,webhook}.
//
// Layer: library.
package config

import "embed"

// FS holds the folders of the providers.
//
//go:embed */crd/bases/*.yaml */rbac/*.yaml */webhook/*.yaml
var FS embed.FS
