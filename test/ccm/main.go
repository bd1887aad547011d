// ccm is a small cloud controller manager for tests. It has the controllers, the leader election and the flags of
// k8s.io/cloud-provider. Its cloud is a file.
package main

import (
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/util/wait"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/app"
	"k8s.io/cloud-provider/app/config"
	"k8s.io/cloud-provider/names"
	"k8s.io/cloud-provider/options"
	"k8s.io/component-base/cli"
	cliflag "k8s.io/component-base/cli/flag"
)

func main() {
	o, err := options.NewCloudControllerManagerOptions()
	if err != nil {
		exit(err)
	}
	cloudprovider.RegisterCloudProvider(providerName, newCloud)
	os.Exit(cli.Run(app.NewCloudControllerManagerCommand(o, initialize, app.DefaultInitFuncConstructors, names.CCMControllerAliases(),
		cliflag.NamedFlagSets{}, wait.NeverStop)))
}

func initialize(c *config.CompletedConfig) cloudprovider.Interface {
	shared := c.ComponentConfig.KubeCloudShared.CloudProvider
	cloud, err := cloudprovider.InitCloudProvider(shared.Name, shared.CloudConfigFile)
	if err == nil && cloud == nil {
		err = fmt.Errorf("expected --cloud-provider=%s, found %q", providerName, shared.Name)
	}
	if err != nil {
		exit(err)
	}
	return cloud
}

func exit(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
