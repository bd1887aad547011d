// Package daemon pins the version of flannel. hack/flannel-build.sh builds it from its module, with the dependencies of its own
// go.mod.
package daemon

import _ "github.com/flannel-io/flannel/pkg/version"
