package manager

import "capstan.dev/capstan/internal/reconciling"

// The control plane provider still uses these names; new code uses package reconciling.
type (
	// Options is reconciling.Options.
	Options = reconciling.Options
	// Provider is reconciling.Provider.
	Provider = reconciling.Provider
)

// IgnoreStatus is reconciling.IgnoreStatus.
var IgnoreStatus = reconciling.IgnoreStatus

// SetReady is reconciling.SetReady.
var SetReady = reconciling.SetReady
