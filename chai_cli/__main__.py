from chai_cli.app import main

main()
