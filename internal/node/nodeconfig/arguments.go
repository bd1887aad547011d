package nodeconfig

import (
	"fmt"
	"slices"
	"strings"
)

// OwnEtcdArgs are the arguments that identify a member or connect it with the other members.
var OwnEtcdArgs = []string{"name", "initial-cluster", "initial-cluster-state", "initial-advertise-peer-urls", "advertise-client-urls",
	"force-new-cluster"}

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

// CheckKubeletArg refuses an argument of the kubelet with which the Node would never be initialized.
func CheckKubeletArg(a Arg) error {
	if a.Name == "cloud-provider" && a.Value != "" && a.Value != "external" {
		return fmt.Errorf("cloud-provider: expected external or no value, found %q", a.Value)
	}
	return nil
}
