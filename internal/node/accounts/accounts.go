// Package accounts defines the users that the services of a machine run as. Their ids are the same on every machine, so
// files keep their owners regardless of the machine's /etc/passwd. Machines share the ids of the host; these are in a
// range that neither Debian nor systemd assigns.
//
// Layer: node. Allowed imports: api, library, contract.
package accounts

import (
	"bytes"
	"fmt"
	"slices"
)

// Users of services, each with its own group.
const (
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
	CoreDNS           = "coredns"
	KubeProxy         = "kube-proxy"
	MetricsServer     = "metrics-server"
	// Config is not a user. It is the group of the files that the user's own arguments name, which the components of the
	// control plane may read.
	Config = "kube-config"
)

const first = 60700

// names in the order of their ids, starting at first. Add new names only at the end.
var names = []string{Etcd, APIServer, ControllerManager, Scheduler, CoreDNS, KubeProxy, Config, MetricsServer}

// ID returns the id of a user and of its group.
func ID(name string) (id int, known bool) {
	i := slices.Index(names, name)
	return first + i, i >= 0
}

// Passwd returns the content of /etc/passwd with the missing accounts added.
func Passwd(old []byte) []byte {
	return complete(old, func(name string, id int) string {
		return fmt.Sprintf("%s:x:%d:%d::/nonexistent:/usr/sbin/nologin\n", name, id, id)
	})
}

// Group returns the content of /etc/group with the missing groups added.
func Group(old []byte) []byte {
	return complete(old, func(name string, id int) string { return fmt.Sprintf("%s:x:%d:\n", name, id) })
}

func complete(old []byte, line func(string, int) string) []byte {
	out := bytes.Clone(old)
	if len(out) > 0 && out[len(out)-1] != '\n' {
		out = append(out, '\n')
	}
	for i, name := range names {
		if !bytes.HasPrefix(out, []byte(name+":")) && !bytes.Contains(out, []byte("\n"+name+":")) {
			out = append(out, line(name, first+i)...)
		}
	}
	return out
}
