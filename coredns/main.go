// coredns is CoreDNS with the plugins that a cluster's DNS needs and no others:
// the cloud providers' ones are most of the upstream binary.
package main

import (
	"slices"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/metadata"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
	_ "github.com/coredns/coredns/plugin/rewrite"
	_ "github.com/coredns/coredns/plugin/template"
	_ "github.com/coredns/coredns/plugin/transfer"
)

// plugins are the directives of the imported packages. "prometheus" is the
// directive of the package metrics.
var plugins = []string{
	"bind", "cache", "errors", "forward", "health", "hosts", "kubernetes", "loadbalance", "log",
	"loop", "metadata", "prometheus", "ready", "reload", "rewrite", "template", "transfer",
}

// directives contains the built-in plugins, in the order of upstream. The order determines in which order plugins see a
// query.
func directives(all []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(d string) bool {
		return !slices.Contains(plugins, d)
	})
}

func main() {
	dnsserver.Directives = directives(dnsserver.Directives)
	coremain.Run()
}
