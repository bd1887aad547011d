// Package config embeds the manifests of the providers: config/<provider>/{crd/bases,rbac,webhook,runtime}.
//
// Layer: library. Allowed imports: api.
package config

import "embed"

// FS contains the folders of the providers.
//
//go:embed */crd/bases/*.yaml */rbac/*.yaml */webhook/*.yaml */runtime/*.yaml
var FS embed.FS
