package nodeconfig

import (
	"fmt"
	"slices"
	"strings"
)

// OwnEtcdArgs are the arguments that identify a member or connect it with the other members. With config-file, etcd ignores all other
// arguments.
var OwnEtcdArgs = []string{"name", "initial-cluster", "initial-cluster-state", "initial-advertise-peer-urls", "advertise-client-urls",
	"force-new-cluster", "config-file"}

// The folder of etcd's data and the audit log, unless arguments name others.
const (
	DefaultEtcdFolder = "/var/lib/etcd"
	DefaultAuditLog   = "/var/log/kubernetes/audit.log"
)

// EtcdFolders are the arguments with the folders of etcd's data. With another folder, a member starts without its data.
var EtcdFolders = []string{"data-dir", "wal-dir"}

// CheckArguments returns the problems of the user's arguments of components.
func (c *NodeConfiguration) CheckArguments() []error {
	var errs []error
	check := func(field string, arguments []Arg, refuse func(Arg) error) {
		for _, a := range arguments {
			if err := refuse(a); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", field, err))
			}
		}
	}
	check("kubelet.extraArgs", c.Kubelet.ExtraArgs, CheckKubeletArg)
	if c.ControlPlane != nil {
		check("cluster.apiServer.extraArgs", c.ControlPlane.APIServer.ExtraArgs, CheckAPIServerArg)
		check("cluster.etcd.extraArgs", c.ControlPlane.Etcd.ExtraArgs, CheckEtcdArg)
		check("cluster.etcd.env", c.ControlPlane.Etcd.Env, CheckEtcdVariable)
	}
	return errs
}

// CheckAPIServerArg refuses an argument of the API server that conflicts with those that Capstan sets.
func CheckAPIServerArg(a Arg) error {
	if strings.HasPrefix(a.Name, "oidc-") || a.Name == "anonymous-auth" || a.Name == "authentication-config" {
		return fmt.Errorf("%s: the API server uses structured authentication; set cluster.apiServer.authentication instead", a.Name)
	}
	return nil
}

// CheckEtcdArg refuses an argument of etcd that conflicts with those that Capstan sets.
func CheckEtcdArg(a Arg) error {
	if slices.Contains(OwnEtcdArgs, a.Name) {
		return fmt.Errorf("%s: Capstan sets it to connect the members of etcd; remove it", a.Name)
	}
	return nil
}

// CheckEtcdVariable refuses an environment variable that etcd reads as an argument: CheckEtcdArg checks arguments only.
func CheckEtcdVariable(v Arg) error {
	if strings.HasPrefix(v.Name, "ETCD_") {
		return fmt.Errorf("%s: etcd reads this variable as an argument; set cluster.etcd.extraArgs instead", v.Name)
	}
	return nil
}

// CheckRestorable refuses arguments with which etcd cannot start from a backup.
func (c *NodeConfiguration) CheckRestorable() error {
	if c.ControlPlane != nil && len(Values(c.ControlPlane.Etcd.ExtraArgs, "wal-dir")) > 0 {
		return fmt.Errorf("cluster.etcd.extraArgs: wal-dir: a restored etcd has its log in data-dir; remove this argument to restore a backup")
	}
	return nil
}

// Values returns the values of an argument.
func Values(arguments []Arg, name string) (values []string) {
	for _, a := range arguments {
		if a.Name == name {
			values = append(values, a.Value)
		}
	}
	return values
}

// CheckKubeletArg refuses an argument of the kubelet with which the Node would never be initialized.
func CheckKubeletArg(a Arg) error {
	if a.Name == "cloud-provider" && a.Value != "" && a.Value != "external" {
		return fmt.Errorf("cloud-provider: expected external or no value, found %q", a.Value)
	}
	return nil
}
